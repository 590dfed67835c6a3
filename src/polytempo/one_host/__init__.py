"""One copy of the weights for all workers of a host: shared_memory and Hogwild!."""
