"""Checkpoints of a run: written asynchronously and atomically, loadable with other parallel degrees."""
