"""Who takes part in an elastic run, and which step is undone or finished when a member is lost. Without I/O."""
