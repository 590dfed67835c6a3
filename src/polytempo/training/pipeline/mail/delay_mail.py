"""`DelayMail`: how late the updates of each stage were, on its way to the first stage, whose rank records rows.

stage k    row at step t ── (delays, updates) ──▶
stage 0                          row at step t + late or after          by then the message is there, so no stage waits
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.core.op import Work
from polytempo.training.pipeline.mail.stage_mail import DELAY_TAG

_MOST_LEAVING = 8


class _Row(NamedTuple):
    """The counts of one row."""

    step: int
    own: Tensor
    others: list[Work[Tensor]]


class DelayMail:
    """One rank's part. `late`: how many steps after its own a batch is back at the first stage.

    Cost: a message of 16 bytes a row from every other stage.
    """

    def __init__(self, late: int) -> None:
        self._late = late
        self._told: Counter[int] = Counter()
        self._rows: deque[_Row] = deque()
        self._leaving: deque[Work[None]] = deque()

    async def row(self, stages: Port, step: int, delays: Counter[int]) -> list[float | None]:
        """After `step` steps, with all delays that this stage has counted so far. All stages call it at the same steps.

        The first stage answers the mean delay of each stage's updates that has become known since the last row; None of
        a stage that is known to have made none. The others answer nothing.
        """
        new, self._told = delays - self._told, Counter(delays)
        counted = [sum(delay * times for delay, times in new.items()), new.total()]
        own = torch.tensor(counted, dtype=torch.float64)
        if stages.rank:
            self._leaving.append(await stages.start(stages.send(own, 0, DELAY_TAG)))
            while len(self._leaving) > _MOST_LEAVING + self._late:
                await self._leaving.popleft()
            return []
        ranks = range(1, stages.size)
        others = [await stages.start(stages.recv(torch.empty_like(own), rank, DELAY_TAG)) for rank in ranks]
        self._rows.append(_Row(step, own, others))
        known = torch.zeros(stages.size, 2, dtype=torch.float64)
        while self._rows and self._rows[0].step <= step - self._late:
            known += await _counts(self._rows.popleft())
        return [late / updates if updates else None for late, updates in known.tolist()]

    async def settle(self) -> None:
        """Wait until what was sent has been received."""
        while self._leaving:
            await self._leaving.popleft()
        while self._rows:
            await _counts(self._rows.popleft())


async def _counts(row: _Row) -> Tensor:
    """(stages, 2): the sum of delays and the number of updates."""
    return torch.stack([row.own, *[await work for work in row.others]])
