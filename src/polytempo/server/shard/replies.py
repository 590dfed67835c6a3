"""Pushes and pulls that wait at a shard, oldest first, and the replies to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
from torch import Tensor

from polytempo.core.rule import Add, Drop, Mix
from polytempo.server.message import Pulled, Push, Pushed, PushPart, Rows


class Waiting(msgspec.Struct, array_like=True, eq=False):
    """A push or pull that has not been answered."""

    kind: Literal["push", "pull"]
    incarnation: int
    sequence: int
    basis: int = 0
    tickets: tuple[int, ...] = ()
    lrs: tuple[float, ...] = ()
    gradient: Tensor | None = None
    """A push's, lent by its worker, as long as it waits to be added or dropped."""
    read: int = -1
    """The buffer of weights that it was computed on, where modifiers need them."""
    verdict: Literal["applied", "dropped"] = "applied"
    """The verdict on a push, once `gradient` is None."""
    reason: str = ""
    staleness: int = 0
    difference: int = -1
    """The buffer of elastic averaging's difference."""
    rows: tuple[Rows, ...] = ()
    """A push's rows of tables, lent as `gradient` is."""
    running: Tensor | None = None
    """A push's running statistics of norms."""
    unused: tuple[str, ...] = ()
    """A push's parameters without a gradient."""
    resulting: bool = False
    """A pull's: it is of the resulting weights."""


def waiting_for(push: Push) -> Waiting:
    """The queue's entry for a push, kept until the push is answered."""
    return Waiting(
        "push",
        push.incarnation,
        push.sequence,
        push.basis,
        push.tickets,
        push.lrs,
        push.gradient.contiguous(),
        rows=push.rows,
        running=push.running,
        unused=push.unused,
    )


def waiting_of(part: PushPart, version: int) -> Waiting:
    """The queue's entry for a part of a host's push: its worker waits for the answer alone."""
    return Waiting("push", part.incarnation, part.sequence, part.basis, part.tickets, staleness=version - part.basis)


def refused(shard: int, push: Push, version: int, verdict: Literal["dropped", "refused"], reason: str) -> Pushed:
    """The reply to a push that the rule does not see, at a shard with weights of `version`."""
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
    """The reply to a push after the rule's decision. `difference`: the answer of elastic averaging."""
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
        """The push of the action's worker with the oldest waiting gradient, and that gradient."""
        for one in self.waiting.get(action.worker, ()):
            if one.gradient is not None:
                return one, one.gradient
        raise RuntimeError(f"the rule {self._rule} says {action}, but no gradient of that worker waits")

    def answerable(self, worker: int) -> Iterator[Waiting]:
        """Take out, oldest first, up to a push with a waiting gradient: answers keep the order of requests."""
        queue = self.waiting.get(worker)
        while queue and queue[0].gradient is None:
            yield queue.pop(0)

    def leave(self, worker: int) -> list[int]:
        """Remove the worker's queue; the answer is the buffers that were held for it."""
        removed = self.waiting.pop(worker, ())
        return [number for one in removed for number in (one.read, one.difference) if number >= 0]
