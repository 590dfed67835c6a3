"""Agents in tasks of a Spark session."""
