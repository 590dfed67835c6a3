"""Checkpoints on disk and in object stores: their files, manifests and hashes."""
