"""Runs that go on when workers are lost, leave and join."""
