"""A worker's side of the parameter server, without I/O."""
