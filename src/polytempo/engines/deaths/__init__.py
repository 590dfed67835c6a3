"""Which process of a run failed first, and why? One line names it."""
