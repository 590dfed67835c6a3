"""Rules: when a shard applies gradients, and with which weight and learning rate."""
