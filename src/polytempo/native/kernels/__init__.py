"""Kernels of the native core on tensors."""
