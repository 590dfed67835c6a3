"""Scores, checkpoints and resumption of a training run."""
