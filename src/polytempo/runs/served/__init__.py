"""Runs with a parameter server: their processes, and the launcher, which replaces killed ones (`run_served`)."""
