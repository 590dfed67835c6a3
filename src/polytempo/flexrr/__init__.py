"""Who takes over from a worker that falls behind? FlexRR's reassignment of work between workers, without I/O."""
