"""Models in parts on several ranks."""
