"""Kernels of the extension as functions on tensors: CUDA where the tensors are there, else the CPU."""
