"""Engines for several hosts: an agent on each starts processes there, and the head decides when an agent is lost."""
