"""The program of one process of a run."""
