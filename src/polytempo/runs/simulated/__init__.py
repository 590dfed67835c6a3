"""Runs under the virtual clock."""
