"""Training runs: configuration, data, the loop, checkpoints."""
