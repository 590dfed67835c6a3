"""Snapshots of shards, and how a shard's state moves."""
