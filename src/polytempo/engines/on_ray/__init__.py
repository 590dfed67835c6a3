"""Agents in actors of a Ray cluster."""
