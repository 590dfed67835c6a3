"""Times of exchanges: every H steps, until or after a step, d steps late, behind the steps between, or by fragments."""

from polytempo.synchronization.delayed import delayed, overlapped
from polytempo.synchronization.every import after, every, rarer, until
from polytempo.synchronization.fragments import behind, blended, fragments

__all__ = ["after", "behind", "blended", "delayed", "every", "fragments", "overlapped", "rarer", "until"]
