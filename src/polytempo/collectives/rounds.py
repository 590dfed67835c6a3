"""Routes as rounds: in each, every rank sends one message and waits for one, as `Port.send_receive` does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Round(NamedTuple):
    """One message from each rank."""

    to: IntArray
    """The receiver of each rank's message: a permutation of the ranks."""
    numel: IntArray
    """How many numbers."""


def stripe_sizes(num_ranks: int, numel: int) -> IntArray:
    """How `tensor_split` cuts `numel` numbers: the first ones are one longer where they do not divide evenly."""
    each, longer = divmod(numel, num_ranks)
    return each + (np.arange(num_ranks) < longer)
