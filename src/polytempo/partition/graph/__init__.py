"""A model as a graph of its operations."""
