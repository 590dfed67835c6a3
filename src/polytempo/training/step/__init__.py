"""One training step: buckets, exchanges, guards, cost."""
