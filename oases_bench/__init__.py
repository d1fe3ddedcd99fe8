"""Benchmarks for the user's own machine: interleaved contestants, medians, ratios."""
