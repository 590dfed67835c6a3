"""Calls as text: how they are parsed, and the names that they may use."""
