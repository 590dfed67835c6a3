"""Short runs of a job that show its batch size and learning rate."""
