"""Executor of schedules: runs a list of ops, independent of layers and models."""
