"""How a model is cut over workers, and in which order they work."""
