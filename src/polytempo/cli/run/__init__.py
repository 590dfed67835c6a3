"""Commands that train, simulate, compare and repeat."""
