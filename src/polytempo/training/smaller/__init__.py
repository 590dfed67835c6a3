"""Training under a rule that makes a network small: weights that stay 0, weights that share values."""
