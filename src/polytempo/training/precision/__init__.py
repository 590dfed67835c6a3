"""Training in 16 bits."""
