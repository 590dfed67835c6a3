"""Who takes part in an elastic run: views, decided by a machine without I/O, and what each member does with them."""
