"""The tensors of a shard: weights, tables, optimizer state, and the memory that is lent."""
