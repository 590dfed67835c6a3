"""Pictures with some places on each rank: areas, halos, windows, norms, and the tensor that knows its places."""
