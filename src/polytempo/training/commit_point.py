"""`CommitPoint`: between a step's exchange and its application, the ranks make sure that all have the whole answer.

    exchange ──▶ all-reduce of five numbers ──▶ optimizer.step()
                 [who wants to stop, who leaves, who was told to save, samples, their marks]

A rank that comes back from the all-reduce knows that all have issued it, and so hold the answer. It costs a message of
40 bytes a step. The same message tells all ranks alike whether they stop after this step, and adds up the samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from polytempo.core import Port
from polytempo.data.sample_account import Counted


class Wishes(NamedTuple):
    """What a rank has heard: others want to join, or it wants to leave."""

    stop: bool = False
    leave: bool = False
    save: bool = False
    """The whole run is to be saved, and to end."""


class Committed(NamedTuple):
    """What all ranks know after the commit point."""

    stop: bool
    """Whether they stop before the next step."""
    leaving: int
    """How many of them leave then."""
    counted: Counted
    """The samples of the step, over all ranks."""
    save: bool = False
    """Whether they save this step, and end."""


async def commit_point(port: Port, wishes: Wishes, own: Counted) -> Committed:
    """Come to the commit point with this rank's samples. Raises what an all-reduce raises where a rank is lost."""
    stop = wishes.stop or wishes.leave
    mine = torch.tensor([stop, wishes.leave, wishes.save, own.samples, own.marks], dtype=torch.int64)
    stops, leaving, saving, samples, marks = (await port.all_reduce(mine)).tolist()
    return Committed(stops > 0, leaving, Counted(samples, marks), saving > 0)
