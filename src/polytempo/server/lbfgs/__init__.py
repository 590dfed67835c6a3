"""Sandblaster L-BFGS: a coordinator orders computations, and shards compute on their parts of vectors."""
