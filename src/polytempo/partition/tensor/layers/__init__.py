"""Layers of which each rank holds a part."""
