"""Exchanges of encoded tensors, and their merge."""
