"""Benchmarks that a user runs on their own machine: contestants interleaved, medians, ratios."""
