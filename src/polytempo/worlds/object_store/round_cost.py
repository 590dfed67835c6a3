"""`round_cost`: requests and bytes of a round of workers that meet in an object store, counted on the exchange itself.

The strategy's exchange runs once among all workers, with zeros for movements, in one thread and without a store. A
virtual world on a cluster `in_bucket` prices each of its collectives by `collective_cost`, which are its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core import Bundle, Port, Transform, world_port
from polytempo.core.bundle import Observed
from polytempo.core.driver import WAITING, Task
from polytempo.core.op import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Compute,
    Now,
    Op,
    ReduceScatter,
)
from polytempo.worlds.collective import members_answers
from polytempo.worlds.object_store.rounds import sent_tensors

_MEETING = -1
"""The channel of meetings, which no exchange has."""


class RequestSeries(Barrier, frozen=True, eq=False):
    """A virtual world's operation of one worker: requests one after the other."""

    puts: int = 0
    gets: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def kind(self) -> str:
        """The name in traces."""
        return "requests"


class RoundCost(NamedTuple):
    """A round without faults. Bytes are tensors'; each object has about 1 kB of names, hashes and positions, too."""

    puts: int
    """Requests of all workers."""
    gets: int
    """Requests of all workers, where each looks when the object is there."""
    sent_bytes: int
    """Bytes from a worker that does not merge."""
    received_bytes: int
    merger_sent_bytes: int
    merger_received_bytes: int
    after_one_another: int
    """Requests that wait for each other."""
    bytes_after_one_another: int
    """Bytes of these."""

    def seconds(self, bytes_per_s: float, latency_s: float) -> float:
        """Time of a round over links of this rate to the store; a request is a message and its answer.

        Pauses between looks are not in it.
        """
        return self.bytes_after_one_another / bytes_per_s + 2 * latency_s * self.after_one_another


def round_cost(transform: Transform, parameters: Bundle, workers: int) -> RoundCost:
    """Requests and bytes of `transform` among `workers` workers, as `StoreRounds` performs it."""
    total = meeting_cost(workers)
    for op in _operations(transform, parameters, workers):
        total = RoundCost(*(a + b for a, b in zip(total, collective_cost(op), strict=True)))
    return total


def push_cost(num_bytes: int, workers: int) -> RoundCost:
    """A push of each worker in a log (`store_log`), where they take turns: no entry is tried twice.

    Every few entries one of them puts a state of the server, too, which is not counted.
    """
    looks = 2 * (workers - 1) + 1
    others = (workers - 1) * num_bytes
    return RoundCost(
        puts=2 * workers,
        gets=workers * looks,
        sent_bytes=num_bytes,
        received_bytes=others,
        merger_sent_bytes=num_bytes,
        merger_received_bytes=others,
        after_one_another=2 + looks,
        bytes_after_one_another=num_bytes + others,
    )


def meeting(port: Port) -> Barrier:
    """A virtual world's operation with the cost of a round's meeting."""
    return Barrier(members=port.members, channel=_MEETING)


def meeting_cost(workers: int) -> RoundCost:
    """Workers' words and the merger's place, which its losers compare, are put; the merger gathers and decides."""
    return RoundCost(2 * workers + 1, (workers - 1) + (1 + workers) + workers, 0, 0, 0, 0, workers + 5, 0)


def collective_cost(ops: Sequence[Collective[Any]]) -> RoundCost:
    """All workers' operation: parts are put, the merger gathers them, decides, and each reads decision and answer."""
    workers, first = len(ops), ops[0]
    if isinstance(first, RequestSeries):
        both = first.sent_bytes, first.received_bytes
        return RoundCost(first.puts, first.gets, *both, *both, first.puts + first.gets, sum(both))
    if ops[0].channel == _MEETING:
        return meeting_cost(workers)
    parts = _parts(ops)
    part, all_parts = max(parts), sum(parts)
    match ops[0]:
        case AllReduce() | ReduceScatter():
            reads, read = 1, part
        case AllGather() | AllToAll():
            reads, read = workers, all_parts
        case Broadcast():
            reads, read = 1, part
        case _:
            reads, read = 0, 0
    merged = _merged(ops[0], part)
    is_merged = bool(merged)
    return RoundCost(
        puts=workers + 1 + is_merged,
        gets=1 + workers + workers * (1 + reads),
        sent_bytes=part,
        received_bytes=read,
        merger_sent_bytes=part + merged,
        merger_received_bytes=all_parts + read,
        after_one_another=2 + workers + is_merged + 2 + reads,
        bytes_after_one_another=part + all_parts + merged + read,
    )


def sent_bytes(ops: Sequence[Collective[Any]]) -> list[int]:
    """Bytes of tensors that each worker puts for an operation of all; the first one merges."""
    if isinstance(ops[0], RequestSeries):
        return [ops[0].sent_bytes]
    first, *others = _parts(ops)
    return [first + _merged(ops[0], first), *others]


def _parts(ops: Sequence[Collective[Any]]) -> list[int]:
    return [sum(map(_bytes, sent_tensors(op, worker).values())) for worker, op in zip(ops[0].members, ops, strict=True)]


def _merged(op: Collective[Any], part: int) -> int:
    return part if isinstance(op, AllReduce | ReduceScatter) else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _operations(transform: Transform, parameters: Bundle, workers: int) -> list[list[Collective[Any]]]:
    """Collectives of all workers, in their order."""
    zeros = Bundle({name: torch.zeros(t.shape, dtype=t.dtype) for name, t in parameters.tensors.items()})
    members = tuple(range(workers))
    zeros.observed = Observed(rate=0.0, loss=torch.zeros(()))
    tasks = [Task(_exchange(transform, world_port(worker, members), zeros.copy())) for worker in members]
    asked: dict[int, Collective[Any]] = {}
    found: list[list[Collective[Any]]] = []

    def begin(op: Op[Any]) -> Any:
        match op:
            case Compute(work, _):
                return work()
            case Now():
                return 0.0
        assert isinstance(op, Collective), f"{op} is refused before"
        asked[len(asked)] = op
        return WAITING

    answers: list[Any] = [None] * workers
    while True:
        asked.clear()
        ended = [task.resume(begin, answer) for task, answer in zip(tasks, answers, strict=True)]
        if all(ended):
            for task in tasks:
                task.result()
            return found
        found.append([asked[worker] for worker in members])
        answers = members_answers(found[-1])


async def _exchange(transform: Transform, port: Port, bundle: Bundle) -> None:
    await transform.apply(port, bundle, transform.init(bundle))
