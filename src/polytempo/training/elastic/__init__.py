"""Training that goes on when ranks come and go."""
