"""Who takes part, who holds which shard, and which batch each worker trains on, without I/O."""
