"""How a user's own training loop meets its strategy."""
