"""Runs on each engine and in the virtual world: launchers, processes, folders."""
