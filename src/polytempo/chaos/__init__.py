"""What if everything fails at once: the server's machines under seeded faults, with checkers that never sleep."""
