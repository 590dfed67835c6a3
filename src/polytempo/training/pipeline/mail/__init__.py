"""Messages between the stages of a pipeline."""
