"""Calls of the functions that users call: names, argument types, checks."""
