"""Short runs of a job in one process, and what they say about its batch size, workers and learning rate."""
