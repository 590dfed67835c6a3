"""FlexRR: workers that fall behind in a step hand work to others. Decisions without I/O, and the step around them."""
