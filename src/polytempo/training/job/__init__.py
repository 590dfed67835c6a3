"""The steps of a job: its program, its evaluation, its goals."""
