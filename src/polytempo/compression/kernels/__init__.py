"""Kernels of codecs for accelerators. Those of the CPU are in `native/`."""
