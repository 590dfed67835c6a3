"""`round_cost`: requests and bytes of a round of workers that meet in an object store, counted on the exchange itself.

The strategy's exchange runs once among all workers, with zeros for movements, in one thread and without a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core import Bundle, Port, Transform, world_port
from polytempo.core.driver import WAITING, Task
from polytempo.core.op import AllGather, AllReduce, AllToAll, Broadcast, Collective, Compute, Now, Op, ReduceScatter
from polytempo.worlds.collective import members_answers
from polytempo.worlds.object_store.rounds import sent_tensors


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
    total = RoundCost(2 * workers + 1, _meeting_gets(workers), 0, 0, 0, 0, workers + 5, 0)
    for op in _operations(transform, parameters, workers):
        total = RoundCost(*(a + b for a, b in zip(total, _cost(op, workers), strict=True)))
    return total


def _meeting_gets(workers: int) -> int:
    """The losers of the merger's place compare its content; the merger gathers; each looks for the decision."""
    return (workers - 1) + (1 + workers) + workers


def _cost(ops: Sequence[Collective[Any]], workers: int) -> RoundCost:
    """An operation: parts are put, the merger gathers them, decides, and each reads the decision and its answer."""
    parts = [sum(map(_bytes, sent_tensors(op, worker).values())) for worker, op in enumerate(ops)]
    part, all_parts = max(parts), sum(parts)
    match ops[0]:
        case AllReduce() | ReduceScatter():
            merged, reads, read = part, 1, part
        case AllGather() | AllToAll():
            merged, reads, read = 0, workers, all_parts
        case Broadcast():
            merged, reads, read = 0, 1, part
        case _:
            merged, reads, read = 0, 0, 0
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


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _operations(transform: Transform, parameters: Bundle, workers: int) -> list[list[Collective[Any]]]:
    """Collectives of all workers, in their order."""
    zeros = Bundle({name: torch.zeros(t.shape, dtype=t.dtype) for name, t in parameters.tensors.items()})
    members = tuple(range(workers))
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
