"""The random states of a process: seeded for a step, and kept as they are while something beside training draws."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global generators at the end of the block."""
    pythons, numpys = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


def seed_step(seed: int, rank: int, step: int, purpose: str) -> None:
    """Seed torch for one step of one rank, so resumed runs and virtual ranks draw the same numbers as real ones."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{step}/{purpose}".encode(), digest_size=7).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest, "little"))
