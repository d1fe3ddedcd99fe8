"""Mixture of experts with load-balanced expert placement. Source: arXiv 2411.10003."""
