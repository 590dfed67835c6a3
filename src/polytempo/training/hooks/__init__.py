"""Hooks on a user's own training loop."""
