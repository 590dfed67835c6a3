"""`SpeedBalance`: one rank's part in dealing global batches by speed.

after each step      the rank's busy seconds in the step / its samples
every 8 steps        their median ── 24 bytes of each rank to all ──▶ `next_shares` ──▶ `DataShard.deal`

All ranks compute the same shares after the same step. Busy seconds are `PaceWatch`'s, without waits for other ranks.
The median leaves out a step with a checkpoint or a score.
"""

from __future__ import annotations

import json
from statistics import median

import torch

from polytempo.core import Mismatch
from polytempo.core.calls.refusals import refuse
from polytempo.data.plan import apportioned
from polytempo.data.shard import DataShard
from polytempo.data.speed_shares import EVERY, next_shares
from polytempo.spec.run_spec import balance_features
from polytempo.training.model.ports import Ports
from polytempo.training.step.replica import Replica


class SpeedBalance:
    """Deals `shard` by the speeds of all replicas. `replica`: this rank's, or this rank's part of one.

    A replica on several ranks is as fast as its slowest part. Cost: 24 bytes a rank in every eighth step.
    `Incompatible` for strategies without an exact mean of uneven parts.
    """

    def __init__(self, shard: DataShard, replica: Replica) -> None:
        refuse(replica.strategy.features | balance_features(replica.strategy, "speed"), strategy=replica.strategy)
        self.replica, self._shard = replica, shard
        shard.balanced = True
        self._steps = 0
        self._seconds: list[float] = []
        """Busy seconds a sample of each step since the last look."""
        self.begins()

    def begins(self) -> None:
        """The next step begins: seconds before it do not count."""
        self._busy_s, self._taken = self._so_far()

    def _so_far(self) -> tuple[float, int]:
        pace = self.replica.pace
        return 0.0 if pace is None else pace.times.busy_s, self._shard.taken

    async def after_step(self, ports: Ports) -> None:
        """Take the step's seconds, and look at the ranks' speeds now and then. All ranks call it after each step."""
        busy_s, taken = self._so_far()
        if taken > self._taken:
            self._seconds.append((busy_s - self._busy_s) / (taken - self._taken))
        self.begins()
        self._steps += 1
        if self._steps % EVERY or ports.data.size == 1:
            return
        seconds, self._seconds = self._seconds, []
        await self._look(ports, median(seconds) if seconds else 0.0)

    async def _look(self, ports: Ports, seconds: float) -> None:
        shard = self._shard
        row = torch.tensor([seconds, shard.epoch, shard.consumed], dtype=torch.float64)
        if ports.model.size > 1:
            row = torch.stack(await ports.model.all_gather(row)).amax(0)
        rows = torch.stack(await ports.data.all_gather(row)).tolist()
        if any(places != rows[0][1:] for _, *places in rows):
            raise Mismatch(
                f"ranks are at different places of their data, [epoch, sample] {[each[1:] for each in rows]}, so their "
                "parts cannot change in one step; take batches equally far ahead on all ranks, or leave balance out"
            )
        paces = [each[0] for each in rows]
        if min(paces) <= 0:
            return
        parts = shard.parts
        found = next_shares(parts, paces)
        if found != parts:
            equal = shard.slices is None and found == apportioned(sum(found), (1,) * len(found))
            shard.deal(None if equal else found)

    @property
    def row(self) -> dict[str, int]:
        """Values for rows of metrics."""
        parts = self._shard.parts
        return {"smallest_part": min(parts), "largest_part": max(parts)}

    def saved(self) -> str:
        """The seconds of this rank that a resumed run needs, as text; the shard's position has the shares."""
        return json.dumps({"steps": self._steps, "seconds": self._seconds})

    def restore(self, text: str) -> None:
        """Go on from `saved`."""
        state = json.loads(text)
        self._steps, self._seconds = state["steps"], state["seconds"]
