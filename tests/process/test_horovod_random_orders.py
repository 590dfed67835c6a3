"""10,000 tensors on each of 4 ranks, each rank in an order of its own: every one is right, and none waits for ever.

The request under a name follows from the seed: the operation, its process set, dtype and shape. So do the fusion
threshold, the cycle time and the cache's capacity.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import horovod_checks  # noqa: F401 - loads the workers' imports once
import polytempo.horovod.torch as hvd
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

RANKS, NAMES, AGAIN = 4, 10_000, 2_000
SETS = ((0, 1, 2, 3), (0, 2), (1, 2, 3), (0, 3))
OPS = (hvd.Sum, hvd.Average, hvd.Min, hvd.Max)


class Asked(NamedTuple):
    """The ranks' request under one name. Rank r's tensors are filled with r + `base`."""

    name: str
    kind: str
    ranks: tuple[int, ...]
    op: hvd.ReductionOp
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    base: int

    def tensors(self, rank: int) -> list[Tensor]:
        """A rank's tensors; a gather gets as many more rows as the rank's number."""
        more = rank if self.kind == "gather" else 0
        return [torch.full((rows + more, width), rank + self.base, dtype=self.dtype) for rows, width in self.shapes]

    def begin(self, rank: int, process_set: hvd.ProcessSet) -> int:
        """Ask for it."""
        given = self.tensors(rank)
        if self.kind == "gather":
            return hvd.allgather_async(given[0], self.name, process_set)
        if self.kind == "broadcast":
            return hvd.broadcast_async_(given[0], self.ranks[-1], self.name, process_set)
        if self.kind == "group":
            return hvd.grouped_allreduce_async(given, name=self.name, op=self.op, process_set=process_set)
        return hvd.allreduce_async_(given[0], name=self.name, op=self.op, process_set=process_set)

    def is_right(self, found: Any) -> bool:
        """True if that is the answer."""
        brought = [self.tensors(rank) for rank in self.ranks]
        if self.kind == "gather":
            return torch.equal(found, torch.cat([each[0] for each in brought]))
        if self.kind == "broadcast":
            return torch.equal(found, brought[-1][0])
        answers = [found] if isinstance(found, Tensor) else found
        return all(
            torch.equal(answer, self._reduced(torch.stack(given)))
            for answer, given in zip(answers, zip(*brought, strict=True), strict=True)
        )

    def _reduced(self, given: Tensor) -> Tensor:
        if self.op is hvd.Sum:
            return given.sum(0).to(self.dtype)
        if self.op is hvd.Average:
            return (given.double().sum(0) / len(given)).trunc().to(self.dtype)
        return given.amin(0) if self.op is hvd.Min else given.amax(0)


def asked(seed: int, number: int) -> Asked:
    """Averages are of integers, which are rounded toward zero, so that every answer is exact."""
    chance = random.Random(f"{seed}/{number}")
    kind, op = chance.choice(("reduce",) * 6 + ("group", "gather", "broadcast")), chance.choice(OPS)
    dtype = chance.choice(
        (torch.int32, torch.int64) if op is hvd.Average else (torch.float32, torch.float64, torch.int32)
    )
    shapes = tuple((chance.randint(0, 9), chance.randint(1, 40)) for _ in range(3 if kind == "group" else 1))
    return Asked(f"tensor.{number}", kind, chance.choice((*SETS[:1] * 3, *SETS[1:])), op, dtype, shapes, number % 100)


def settings(seed: int) -> dict[str, str]:
    """The settings of negotiation."""
    chance = random.Random(seed)
    return {
        "HOROVOD_FUSION_THRESHOLD": str(chance.choice((0, 4096, 1 << 20, 128 << 20))),
        "HOROVOD_CYCLE_TIME": str(chance.choice((0, 1, 20))),
        "HOROVOD_CACHE_CAPACITY": str(chance.choice((0, 64, 1024, 20_000))),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    }


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_orders_of_ten_thousand_tensors(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}: {settings(seed)}")
    for name, value in settings(seed).items():
        monkeypatch.setenv(name, value)

    def work(_: RankInfo) -> Result:
        parts = [hvd.ProcessSet(ranks) for ranks in SETS[1:]]
        hvd.init(process_sets=parts)
        sets = dict(zip(SETS, (hvd.global_process_set, *parts), strict=True))
        rank, wrong = hvd.rank(), []
        for turn, count in enumerate((NAMES, AGAIN)):  # the second time ranks know some of the names
            mine = [each for number in range(count) if rank in (each := asked(seed, number)).ranks]
            order = random.Random(f"{seed}/{turn}/{rank}")
            order.shuffle(mine)
            handles = {each: each.begin(rank, sets[each.ranks]) for each in mine}
            order.shuffle(mine)
            wrong += [each.name for each in mine if not each.is_right(hvd.synchronize(handles[each]))]
        hvd.barrier()
        hvd.shutdown()
        return wrong

    assert launch(work, RANKS, threads=1, timeout_s=280) == [[]] * RANKS
