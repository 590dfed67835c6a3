"""Layers with a part on each rank."""
