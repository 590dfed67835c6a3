"""Workers of a parameter server."""
