"""A stage of a pipeline at work: it performs any schedule in any world."""
