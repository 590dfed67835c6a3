"""Times of exchanges: every H steps, until or after a step, d steps late, or behind the steps between."""

from polytempo.synchronization.delayed import delayed, overlapped
from polytempo.synchronization.every import after, every, until

__all__ = ["after", "delayed", "every", "overlapped", "until"]
