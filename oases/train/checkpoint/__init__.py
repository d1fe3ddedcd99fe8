"""Checkpoints of a run: written behind the training, whole or absent, readable at other degrees."""
