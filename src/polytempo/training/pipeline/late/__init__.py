"""Stages whose gradients are late, or estimated."""
