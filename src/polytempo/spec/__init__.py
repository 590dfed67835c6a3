"""Runs as text and as values: calls such as `local_sgd(period=8)`, and the tables of their names."""
