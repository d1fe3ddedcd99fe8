"""Tensor-parallel blocks that are run by a schedule."""
