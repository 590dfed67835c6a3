"""How a model is trained by a strategy: replicas, loops, jobs, scores, checkpoints."""
