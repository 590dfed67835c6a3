"""What a process asks of its system: files, locks, URLs, descriptors, signals."""
