"""`LossMail`: the loss of each batch on its way from the last stage to the first one, which records it.

last stage    F t B t ── loss t ──▶
first stage                    … B t ── loss t          it comes with the batch's gradient, so no stage waits for it
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.core.op import Work
from polytempo.training.pipeline.mail.stage_mail import LOSS_TAG

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
        """At the last stage: the losses that the first one has not been asked for yet."""
        self._again: list[Tensor] = []
        self._missing = 0

    async def step(self, stages: Port, loss: Tensor | None) -> Tensor | None:
        """After a step with a batch. Of the last stage `loss` is that of its batch.

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
        """Go on after `step` steps. `losses`: those that were under way, at the last stage."""
        self.under_way.extend(losses)
        self._again, self._missing = list(losses), min(step, self._late)

    async def rest(self) -> list[Tensor]:
        """Losses that have not been answered yet; what was sent has been received."""
        while self._leaving:
            await self._leaving.popleft()
        found = [(await work)[0] for work in self._arriving]
        self._arriving.clear()
        return found
