"""Kernels of codecs for accelerators. The kernels for the CPU are in `native/`."""
