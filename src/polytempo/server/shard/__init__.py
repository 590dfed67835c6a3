"""A shard of the parameters, its copies and their snapshots: machines without I/O."""
