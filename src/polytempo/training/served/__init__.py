"""How a worker of a parameter server trains."""
