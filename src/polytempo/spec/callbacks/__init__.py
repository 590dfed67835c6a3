"""Callbacks of a run: their calls, the callbacks that ship, and their text."""
