"""How a process that a launcher started finds its world."""
