"""How a user's own training loop meets parameter servers."""
