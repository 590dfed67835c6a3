"""Training loops of one's own, made distributed."""
