"""Training loops of a user with a parameter server."""
