"""Sums, merges and sets of numbers, and the work that they cost."""
