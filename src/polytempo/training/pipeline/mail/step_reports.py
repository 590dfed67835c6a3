"""Reports of each step on their way to the first stage, which records them: losses, and delays of updates.

last stage    F t B t ── loss t ──▶
first stage                    … B t ── loss t          it comes with the batch's gradient, so no stage waits for it

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
from polytempo.training.pipeline.mail.stage_mail import DELAY_TAG, LOSS_TAG

_MOST_LEAVING = 8


class LossMail:
    """One rank's part. `late`: how many steps after its own a batch is back at the first stage.

    Cost: a message of 8 bytes a step.
    """

    def __init__(self, late: int) -> None:
        self._late = late
        self._arriving: deque[Work[Tensor]] = deque()
        self._leaving: deque[Work[None]] = deque()
        self.under_way: deque[Tensor] = deque(maxlen=late)
        """Losses at the last stage that the first one has not been asked for yet."""
        self._again: list[Tensor] = []
        self._missing = 0

    async def step(self, stages: Port, loss: Tensor | None) -> Tensor | None:
        """Send or receive after a step with a batch. `loss`: at the last stage, the loss of its batch.

        The first stage answers the loss of the batch that came back in this step, if one did.
        """
        if stages.size == 1:
            return loss
        last = stages.size - 1
        if stages.rank == last:
            assert loss is not None, "the last stage has forwarded a batch"
            sent = loss.detach().reshape(1).to("cpu", torch.float64, copy=True)
            self.under_way.append(sent)
            for each in [*self._again, sent]:
                self._leaving.append(await stages.start(stages.send(each, 0, LOSS_TAG)))
            while len(self._leaving) > self._late + _MOST_LEAVING:
                await self._leaving.popleft()
            self._again = []
        elif stages.rank == 0:
            for _ in range(1 + self._missing):
                like = torch.empty(1, dtype=torch.float64)
                self._arriving.append(await stages.start(stages.recv(like, last, LOSS_TAG)))
            self._missing = 0
            if len(self._arriving) > self._late:
                return (await self._arriving.popleft())[0]
        return None

    def restore(self, losses: list[Tensor], step: int) -> None:
        """Go on after `step` steps. `losses`: the losses that were under way, at the last stage."""
        self.under_way.extend(losses)
        self._again, self._missing = list(losses), min(step, self._late)

    async def rest(self) -> list[Tensor]:
        """Losses that have not been answered yet; all messages have been received."""
        while self._leaving:
            await self._leaving.popleft()
        found = [(await work)[0] for work in self._arriving]
        self._arriving.clear()
        return found


class _Row(NamedTuple):
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
        """Send the delays that this stage has counted in `step` steps. All stages call it at the same steps.

        The first stage answers the mean delay of each stage's updates that has become known since the last row; None
        for a stage without any. The others answer nothing.
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
        """Wait until all messages have been received."""
        while self._leaving:
            await self._leaving.popleft()
        while self._rows:
            await _counts(self._rows.popleft())


async def _counts(row: _Row) -> Tensor:
    """(stages, 2): the sum of delays and the number of updates."""
    return torch.stack([row.own, *[await work for work in row.others]])
