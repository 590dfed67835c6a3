"""`VectorShard`: a shard's part of all vectors, and the operations on it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polytempo.server.lbfgs.messages import (
    FINAL,
    Answered,
    Contribute,
    Contributed,
    Fetch,
    Fetched,
    Open,
    Operate,
    RunOver,
)
from polytempo.server.lbfgs.operations import VectorOperation, X
from polytempo.server.message import Message, Outbox


class Vectors:
    """Vectors by name, of one length, float64. Begins with x."""

    def __init__(self, x: Tensor) -> None:
        self._held = {X: x.to(torch.float64, copy=True)}

    def __getitem__(self, name: str) -> Tensor:
        """The vector of that name."""
        return self._held[name]

    def zero_(self, name: str) -> None:
        """Let `name` be 0."""
        self._held[name] = torch.zeros_like(self._held[X])

    def perform_(self, operation: VectorOperation) -> float:
        """Carry it out. Returns a dot product, or 0."""
        kind, out, a, b, factor = operation
        match kind:
            case "dot":
                return float(self._held[a] @ self._held[b])
            case "scale":
                self._held[out] = factor * self._held[a]
            case "add":
                self._held[out] = torch.add(self._held[a], self._held[b], alpha=factor)
            case _:
                raise ValueError(f"vectors know dot, scale and add, not {kind!r}")
        return 0.0


class VectorShard:
    """A machine without I/O (see `server.loop.Machine`) with the part `x` of the parameters, shape (n,).

    A portion's gradient is added once, whichever replicas send it, in the order of arrival: sums of two runs agree to
    rounding. Memory: 8 n bytes for each vector, 2 m + 7 of them.
    """

    def __init__(self, coordinator: int, x: Tensor) -> None:
        self.vectors, self.finished = Vectors(x), False
        self._coordinator = coordinator
        self._point, self._at, self._into = -1, X, ""
        self._taken: set[int] = set()

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Perform, hand out, or add up."""
        match message:
            case Operate(kind, out, a, b, factor):
                value = self.vectors.perform_(VectorOperation(kind, out, a, b, factor))
                return [(source, Answered(value))] if kind == "dot" else []
            case Open(point, at, into):
                self._point, self._at, self._into = point, at, into
                self._taken = set()
                self.vectors.zero_(into)
                return [(source, Answered(0.0))]
            case Fetch(point) if point == FINAL:
                return [(source, Fetched(point, self.vectors[X]))]
            case Fetch(point) if point == self._point:
                return [(source, Fetched(point, self.vectors[self._at]))]
            case Contribute(point, portion, gradient):
                if point == self._point and portion not in self._taken:
                    self._taken.add(portion)
                    self.vectors[self._into].add_(gradient)
                return [(source, Contributed(point, portion))]
            case RunOver() if source == self._coordinator:
                self.finished = True
        return []

    def tick(self, now_s: float) -> Outbox:
        """Nothing happens by time."""
        return []

    def wait_s(self, now_s: float) -> float:
        """Until something arrives."""
        return math.inf

    def flops(self, message: Message) -> float:
        """Two for each element."""
        return 2.0 * self.vectors[X].numel() if isinstance(message, Operate | Contribute) else 0.0
