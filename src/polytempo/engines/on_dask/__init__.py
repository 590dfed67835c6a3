"""Agents in tasks of a dask cluster."""
