"""`StreamMeeting`: ranks that read a stream in parts tell each other of their next batches, one step ahead.

step t      take batch t ── read batch t + 1, send its numbers ── compute batch t ──────────────────╮
step t + 1  wait for the numbers of all ranks, which have come meanwhile ── take batch t + 1, or end ◀╯
"""

from __future__ import annotations

import torch

from polytempo.collectives import tree
from polytempo.core import Port
from polytempo.core.op import Work
from polytempo.data.shard import DataShard
from polytempo.spec.job import Job
from polytempo.spec.job_calls import BATCH, ON_BATCH, called
from polytempo.training.model.randomness import seed_step

_CHANNEL = 1022


class StreamMeeting:
    """The meetings of one epoch. All ranks of `data` make one, and call it alike. Without parts it does nothing.

    Cost: 24 bytes for each rank up and down a tree in each step; a batch of memory.
    """

    def __init__(self, data: Port, shard: DataShard, job: Job, seed: int) -> None:
        self._port, self._shard, self._job, self._seed = data.on_channel(_CHANNEL), shard, job, seed
        self._pieces = shard.pieces
        self._coming: Work[torch.Tensor] | None = None

    async def ask(self, step: int) -> None:
        """Read the batch of a step, and send its numbers."""
        if self._pieces is None or self._coming is not None:
            return
        seed_step(self._seed, self._port.rank, step, "data")
        rows = torch.zeros(self._port.size, 3, dtype=torch.int64)
        rows[self._port.rank] = torch.tensor(
            called(self._job, BATCH, self._pieces.row, self._shard.epoch, facts=lambda: ON_BATCH)
        )
        self._coming = await self._port.start(tree(self._port, rows.flatten()))

    async def hear(self, step: int) -> None:
        """Wait for all ranks' numbers of this step's batch."""
        await self.ask(step)
        if self._pieces is not None and self._coming is not None:
            coming, self._coming = self._coming, None
            self._pieces.hear((await coming).reshape(-1, 3).tolist())

    async def end(self) -> None:
        """The epoch, or the run, ends here: wait for numbers under way."""
        if self._coming is not None:
            await self._coming
            self._coming = None
