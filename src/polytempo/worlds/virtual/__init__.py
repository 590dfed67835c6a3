"""The virtual world: a heap of events and a clock that jumps."""
