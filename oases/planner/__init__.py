"""Finds the fastest way to train a model on a cluster. Imports no torch."""
