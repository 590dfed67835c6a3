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

_CHANNEL = 960
_MOST_LEAVING = 8


class LossMail:
    """One rank's part. `late`: how many steps after its own a batch is back at the first stage.

    Cost: a message of 8 bytes a step.
    """

    def __init__(self, late: int) -> None:
        self._late = late
        self._arriving: deque[Work[Tensor]] = deque()
        self._leaving: deque[Work[None]] = deque()

    async def step(self, stages: Port, loss: Tensor | None) -> Tensor | None:
        """After a step with a batch. Of the last stage `loss` is that of its batch.

        The first stage answers the loss of the batch that came back in this step, if one did.
        """
        if stages.size == 1:
            return loss
        port, last = stages.on_channel(_CHANNEL), stages.size - 1
        if stages.rank == last:
            assert loss is not None, "the last stage has forwarded a batch"
            sent = loss.detach().reshape(1).to("cpu", torch.float64, copy=True)
            self._leaving.append(await port.start(port.send(sent, 0)))
            if len(self._leaving) > self._late + _MOST_LEAVING:
                await self._leaving.popleft()
        elif stages.rank == 0:
            like = torch.empty(1, dtype=torch.float64)
            self._arriving.append(await port.start(port.recv(like, last)))
            if len(self._arriving) > self._late:
                return (await self._arriving.popleft())[0]
        return None

    async def rest(self) -> list[Tensor]:
        """Losses that have not been answered yet; what was sent has been received."""
        while self._leaving:
            await self._leaving.popleft()
        found = [(await work)[0] for work in self._arriving]
        self._arriving.clear()
        return found
