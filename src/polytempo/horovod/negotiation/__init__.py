"""Which operations all ranks have asked for, in which order they run, and which become one. Without I/O."""
