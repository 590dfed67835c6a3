"""Runs with a parameter server: workers, copies of shards, and the coordinator."""
