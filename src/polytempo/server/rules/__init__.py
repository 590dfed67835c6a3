"""Rules: the time, weight and learning rate with which a shard applies gradients."""
