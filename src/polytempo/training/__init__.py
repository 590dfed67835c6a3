"""Training of a model by a strategy."""
