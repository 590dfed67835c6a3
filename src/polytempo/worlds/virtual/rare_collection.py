"""`collecting_rarely`: Python's cyclic garbage collector while millions of small objects come and go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 4_000_000
"""After so many more objects than before it looks for cycles; Python's own number is 700."""

_MANY_OBJECTS = 100_000
"""So many young objects are looked through in a few milliseconds."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """The collector looks for cycles far less often, and as often as before afterwards.

    A simulation's operations, events and coroutines are freed when nothing refers to them; hardly any lie in cycles.
    Each look at those that live takes longer the more ranks there are: a fifth of the time of 2,000 workers, and an
    eighth of that of 3,000 with a hundredth of the looks.
    """
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, _NEW_OBJECTS), *older)
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY_OBJECTS and not gc.get_freeze_count():  # it counts what is frozen one by one
            gc.freeze()  # and thaw: so all that lives counts as old, and need not be looked through now
            gc.unfreeze()
        gc.set_threshold(young, *older)
