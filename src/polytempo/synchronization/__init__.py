"""When workers talk: every H steps, until or after a step, or d steps late."""

from polytempo.synchronization.delayed import delayed
from polytempo.synchronization.every import after, every, until

__all__ = ["after", "delayed", "every", "until"]
