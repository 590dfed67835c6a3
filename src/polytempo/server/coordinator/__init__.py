"""The coordinator: it decides the members, the shards' nodes and each worker's batches, without I/O."""
