"""Data in shards: sources that are read from files, a stretch at a time, and their order and assignment to workers."""
