"""A run's state while it works: progress, metrics, live status."""
