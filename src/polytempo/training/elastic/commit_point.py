"""`CommitPoint`: between a step's exchange and its application, the ranks make sure that all have the whole answer.

    exchange ──▶ all-reduce of five numbers ──▶ optimizer.step(), or parameters become the exchanged ones
                 [requests to stop, to leave and to save, samples, their marks]

A rank that comes back from the all-reduce knows that all have issued it, and so hold the answer. It costs a message of
40 bytes, and 16 more for each further epoch with samples. The same message tells all ranks alike whether
they stop after this step, and adds up the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from polytempo.core import Port
from polytempo.data.sample_account import Counted
from polytempo.spec.callbacks.callback import Control

_ASKED = 1 << 32
"""Bits of callbacks' requests stand above the number of ranks that ask for a save: so the message stays as it is."""


class Wishes(NamedTuple):
    """A rank's requests and news."""

    stop: bool = False
    leave: bool = False
    save: bool = False
    asked: Control = Control()
    """Requests of callbacks, which rank 0 brings."""
    broken: bool = False
    """Another rank of the group is lost, so that there will be no next commit point."""


class Committed(NamedTuple):
    """The ranks' common knowledge after the commit point."""

    stop: bool
    leaving: int
    counted: dict[int, Counted]
    """The samples of the step, or of the steps since the last commit point, over all ranks and by epoch."""
    save: bool = False
    asked: Control = Control()


async def commit_point(port: Port, wishes: Wishes, own: Mapping[int, Counted]) -> Committed:
    """Come to the commit point with this rank's samples by epoch; all ranks bring the same epochs.

    Raises the errors of an all-reduce if a rank is lost.
    """
    stop, epochs = wishes.stop or wishes.leave, sorted(own)
    numbers = [
        stop,
        wishes.leave,
        wishes.save + _ASKED * packed(wishes.asked),
        *(number for epoch in epochs for number in own[epoch]),
    ]
    stops, leaving, saving, *sums = (await port.all_reduce(torch.tensor(numbers, dtype=torch.int64))).tolist()
    counted = {epoch: Counted() + Counted(*sums[2 * i : 2 * i + 2]) for i, epoch in enumerate(epochs)}
    saves, bits = saving % _ASKED, saving // _ASKED
    return Committed(stops > 0, leaving, counted, saves > 0, Control(*(bool(bits >> place & 1) for place in range(3))))


def packed(asked: Control) -> int:
    """The requests as bits."""
    return sum(bit << place for place, bit in enumerate(asked))
