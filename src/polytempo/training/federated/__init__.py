"""Training by clients in rounds."""
