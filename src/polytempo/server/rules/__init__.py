"""When a shard applies gradients, and how far they move the weights."""
