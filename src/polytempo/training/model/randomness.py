"""The random states of a process: seeded for a step, and kept as they are while something beside training draws."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from polytempo.device import first_modes, seed_generators
from polytempo.device import kept_random_states as kept_generators

_turn = threading.RLock()


def _forked() -> None:
    global _turn
    _turn = threading.RLock()  # the thread that held it is not in the child


os.register_at_fork(after_in_child=_forked)


@contextmanager
def in_turn() -> Iterator[None]:
    """Let one thread after the other be inside: torch's generators are the process's."""
    with _turn:
        yield


@contextmanager
def caller_state_kept() -> Iterator[None]:
    """Begin with torch's first modes, also inside a block of the caller, and restore the random states at the end."""
    kept = ExitStack()
    kept.enter_context(kept_random_states())
    try:
        with first_modes():
            yield
    finally:
        with in_turn():
            kept.close()


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global generators at the end of the block."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with kept_generators():
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


def seed_step(seed: int, rank: int, step: int, purpose: str) -> None:
    """Seed torch for one step of one rank, so resumed runs and virtual ranks draw the same numbers as real ones."""
    seed_generators(seed_of(seed, rank, step, purpose))


def seed_of(seed: int, rank: int, step: int, purpose: str) -> int:
    """The seed of a rank's random numbers for a purpose in a step."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{step}/{purpose}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
