"""Commands that measure this machine, and choose by what they measured."""
