"""Stages with late or estimated gradients."""
