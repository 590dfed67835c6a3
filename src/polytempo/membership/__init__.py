"""Who takes part in a synchronous run: views, decided by a machine without I/O, and what each member does with them."""
