"""The random states of a process, which stay as they are while something beside training draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_random_states() -> Iterator[None]:
    """What is drawn inside is as if it had not been: Python's, NumPy's and torch's global generators are set back."""
    pythons, numpys = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
