"""Measurements of this machine: Polytempo, its peers and the limit, in turns in the same processes."""
