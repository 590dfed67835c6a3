"""The operations that all ranks have asked for, their order, and their fusion. Without I/O."""
