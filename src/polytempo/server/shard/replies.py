"""Pushes and pulls that wait at a shard, oldest first, and the replies to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import Tensor

from polytempo.core.rule import Add, Drop, Mix
from polytempo.server.message import Pulled, Push, Pushed, Rows
from polytempo.server.snapshots.state import Waiting


def refused(shard: int, push: Push, version: int, verdict: Literal["dropped", "refused"], reason: str) -> Pushed:
    """The reply to a push that the rule does not see, from a shard whose weights are of `version`."""
    return Pushed(
        shard=shard,
        worker=push.worker,
        incarnation=push.incarnation,
        sequence=push.sequence,
        version=version,
        staleness=version - push.basis,
        verdict=verdict,
        reason=reason,
    )


def pushed(shard: int, worker: int, waiting: Waiting, version: int, difference: Tensor | None) -> Pushed:
    """The reply to a push on which the rule has decided. `difference`: that of elastic averaging."""
    return Pushed(
        shard=shard,
        worker=worker,
        incarnation=waiting.incarnation,
        sequence=waiting.sequence,
        version=version,
        staleness=waiting.staleness,
        verdict=waiting.verdict,
        reason=waiting.reason,
        difference=difference,
    )


def pulled(
    shard: int,
    worker: int,
    waiting: Waiting,
    version: int,
    values: Tensor,
    *,
    rows: tuple[Rows, ...],
    running: Tensor | None,
) -> Pulled:
    """The reply to a pull: the weights `values` of `version`, rows of tables, running statistics of norm layers."""
    return Pulled(
        shard=shard,
        worker=worker,
        incarnation=waiting.incarnation,
        sequence=waiting.sequence,
        version=version,
        values=values,
        rows=rows,
        running=running,
    )


class Queues:
    """Pushes and pulls that have not been answered, at a shard with that rule. `waiting`: worker -> its queue."""

    def __init__(self, rule: str, waiting: dict[int, list[Waiting]] | None = None) -> None:
        self._rule = rule
        self.waiting = {} if waiting is None else waiting

    def add(self, worker: int, one: Waiting) -> None:
        """`one` waits at the end of `worker`'s queue."""
        self.waiting.setdefault(worker, []).append(one)

    def oldest(self, action: Add | Drop | Mix) -> tuple[Waiting, Tensor]:
        """The push of the action's worker whose gradient waits longest, and that gradient."""
        for one in self.waiting.get(action.worker, ()):
            if one.gradient is not None:
                return one, one.gradient
        raise RuntimeError(f"the rule {self._rule} says {action}, but no gradient of that worker waits")

    def answerable(self, worker: int) -> Iterator[Waiting]:
        """Take out, oldest first, up to a push whose gradient still waits: answers keep the order of requests."""
        queue = self.waiting.get(worker)
        while queue and queue[0].gradient is None:
            yield queue.pop(0)

    def leave(self, worker: int) -> list[int]:
        """Remove the worker's queue; the answer is the buffers that were held for it."""
        removed = self.waiting.pop(worker, ())
        return [number for one in removed for number in (one.read, one.difference) if number >= 0]
