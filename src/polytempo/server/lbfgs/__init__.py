"""Sandblaster L-BFGS: shards of a parameter server compute on their parts of vectors, and a coordinator says what."""
