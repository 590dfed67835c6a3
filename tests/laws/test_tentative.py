"""A strategy's memory changes once per optimizer step, by the exchange that the step uses, under the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from laws.catalogue import ROWS, Row, label
from laws.harness import HOST, Rank, Setting, flat, joined_batch, loss_of, run
from polytempo.core import Port
from polytempo.worlds import VirtualWorld
from some_cases import some_of

STEPS = 7
TOGETHER = [(3, torch.float32), (3, torch.bfloat16)]
CASES = [(row, *case) for number, row in enumerate(ROWS) for case in [(1, torch.float32), *some_of(TOGETHER, number)]]


class Undecided(Rank):
    """Exchanges unused gradients before the step's own."""

    async def steps(self, port: Port, first: int, last: int) -> None:
        """Steps `first` to `last` - 1, remembering the parameters after each."""
        for step in range(first, last):
            for used in (step + 100, step):
                await port.mark(step)
                batch = tuple(t[self.part] for t in joined_batch(used, self.dtype))
                self.optimizer.zero_grad()
                loss_of(self.model, batch).backward()  # type: ignore[arg-type]
                for bucket in self.replica.buckets:
                    await self.replica.exchange(port, bucket, share=len(batch[0]) / 24)
                for parameter in self.model.parameters():
                    if parameter.grad is not None and used != step:
                        parameter.grad.mul_(7.0)  # whoever drops gradients may have done anything with them
            self.optimizer.step()
            await self.replica.finish_step(port)
            self.history.append(flat(self.model))


def seconds_of(row: Row, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """The seconds that a period by time has counted: unused exchanges take some, too."""
    return {name: scalars[name] for name in scalars if "by_time" in label(row) and name.endswith("/5/0")}


@pytest.mark.parametrize(
    ("row", "num_ranks", "dtype"), CASES, ids=[f"{label(row)}-{ranks}-{dtype}" for row, ranks, dtype in CASES]
)
def test_an_exchange_that_no_step_uses_leaves_nothing(row: Row, num_ranks: int, dtype: torch.dtype) -> None:
    setting = Setting("sgd", dtype, bucket_bytes=64)
    expected, _ = run(row.make(), num_ranks, STEPS, setting)
    ranks = [Undecided(row.make(), rank, num_ranks, setting, False) for rank in range(num_ranks)]

    async def program(port: Port) -> None:
        await ranks[port.rank].steps(port, 0, STEPS)
        await ranks[port.rank].replica.settle()

    VirtualWorld(HOST, num_ranks).run(program)
    for rank, other in zip(ranks, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rank.history, other.history, strict=True))
        remembered, others = rank.replica.state(), other.replica.state()
        assert {**remembered.scalars, **seconds_of(row, others.scalars)} == others.scalars
        assert remembered.tensors.keys() == others.tensors.keys()
        assert all(torch.equal(tensor, others.tensors[name]) for name, tensor in remembered.tensors.items())
