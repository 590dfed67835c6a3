"""Engines for several hosts: an agent on each of them starts the run's processes there."""
