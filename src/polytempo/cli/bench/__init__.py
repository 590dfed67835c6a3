"""Commands that measure this machine, and choose by their measurements."""
