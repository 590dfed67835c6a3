"""Kernels of the native core on tensors, and their twins in torch."""
