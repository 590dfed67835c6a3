"""A process and its system: files, locks, URLs, descriptors, signals."""
