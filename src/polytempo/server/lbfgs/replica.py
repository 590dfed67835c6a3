"""`LbfgsReplica`: fetches a point once, and computes losses and gradients of portions there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polytempo.server.lbfgs.messages import Contribute, Contributed, Fetch, Fetched, PortionDone, PortionTask, RunOver
from polytempo.server.message import Message, Outbox

PortionGradient = Callable[[Tensor, int, int], tuple[float, Tensor]]
"""All parameters, shape (n,), float64, and two bounds -> the loss and the gradient of these samples."""


class LbfgsReplica:
    """A machine without I/O (see `server.loop.Machine`). `sizes`: how many elements each of the `shards` has."""

    def __init__(
        self,
        coordinator: int,
        shards: Sequence[int],
        sizes: Sequence[int],
        compute: PortionGradient,
        flops: float = 0.0,
    ) -> None:
        self._coordinator, self._shards, self._sizes = coordinator, list(shards), list(sizes)
        self._compute, self._flops = compute, flops
        self._task: PortionTask | None = None
        self._point = -1
        self._parts: dict[int, Tensor] = {}
        self._loss = 0.0
        self._acknowledged: set[int] = set()
        self.finished = False

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take a task, a part of a point, or a shard's word that it has the gradient."""
        task = self._task
        match message:
            case PortionTask(point):
                self._task = message
                if point != self._point:
                    self._point, self._parts = point, {}
                    return [(shard, Fetch(point)) for shard in self._shards]
                return self._computed(message) if len(self._parts) == len(self._shards) else []
            case Fetched(point, values) if point == self._point and task is not None:
                self._parts[source] = values
                return self._computed(task) if len(self._parts) == len(self._shards) else []
            case Contributed(point, portion) if task is not None and (point, portion) == (task.point, task.portion):
                self._acknowledged.add(source)
                if len(self._acknowledged) == len(self._shards):
                    self._task = None
                    return [(self._coordinator, PortionDone(point, portion, self._loss))]
            case RunOver() if source == self._coordinator:
                self.finished = True
        return []

    def _computed(self, task: PortionTask) -> Outbox:
        whole = torch.cat([self._parts[shard] for shard in self._shards])
        self._acknowledged = set()
        self._loss, gradient = self._compute(whole, task.begin, task.end)
        parts = gradient.to(torch.float64).split(self._sizes)
        return [
            (shard, Contribute(task.point, task.portion, part)) for shard, part in zip(self._shards, parts, strict=True)
        ]

    def tick(self, now_s: float) -> Outbox:
        """Nothing happens by time."""
        return []

    def wait_s(self, now_s: float) -> float:
        """Until something arrives."""
        return math.inf

    def flops(self, message: Message) -> float:
        """The most that the portion of a message costs."""
        task = message if isinstance(message, PortionTask) else self._task if isinstance(message, Fetched) else None
        return 0.0 if task is None else self._flops * (task.end - task.begin)
