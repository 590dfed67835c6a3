"""Training steps of virtual workers."""
