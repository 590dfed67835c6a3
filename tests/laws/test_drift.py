"""Ranks that promise equal models compare hashes of them: never a false alarm, and a flip of any bit is found.

The ranks here are virtual; their looks are compared outside the clock: a look is not an op and takes no time.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laws.catalogue import ROWS, Row, label
from laws.harness import HOST, Rank, Setting
from polytempo.core import Port
from polytempo.training.hooks.drift import (
    DriftLook,
    Walk,
    comparable,
    compared,
    described,
    difference,
    judged,
    looked,
    settings,
)
from polytempo.training.step.replica import Replica
from polytempo.worlds import VirtualWorld

STEPS = 5
NUM_FLIPS = 100
IN_STEP = [row for row in ROWS if row.make().synchronized and row.make().one_copy is None]
"""The others promise nothing, or have one copy of the compared parameters."""


class Looking:
    """One rank's looks, one after each step."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.walk, self.looks = rank, Walk(), list[DriftLook]()
        what = compared(rank.replica)
        assert what is not None
        self.what = what

    async def steps(self, port: Port) -> None:
        for step in range(STEPS):
            await self.rank.steps(port, step, step + 1)
            tensors = self.walk.next(list(comparable(self.rank.replica, self.what).values()))
            self.looks.append(looked(self.rank.replica, self.what, tensors, buffers=True))
        await self.rank.replica.settle()


@pytest.mark.parametrize("row", IN_STEP, ids=label)
def test_ranks_in_step_look_alike_after_every_step(row: Row) -> None:
    ranks = [Looking(Rank(row.make(), rank, 3, Setting("adam"), True)) for rank in range(3)]
    VirtualWorld(HOST, 3).run(lambda port: ranks[port.rank].steps(port))
    for step in range(STEPS):
        looks = [rank.looks[step] for rank in ranks]
        assert judged(looks).others == [], step
    own = ranks[0].rank.replica.exchanges_parameters
    assert any("state" in name for name in comparable(ranks[0].rank.replica, ranks[0].what)) is not own


@pytest.mark.parametrize("row", [row for row in ROWS if not row.make().synchronized], ids=label)
def test_strategies_that_promise_nothing_are_not_watched(row: Row) -> None:
    assert compared(Rank(row.make(), 0, 3, Setting(), False).replica) is None


# ------------------------------------------------------------------ faults


def replicas(num_ranks: int) -> list[Replica]:
    """Equal ranks of 3.5 MiB each, after one step: Adam's counts, two dtypes, and tensors of one element."""
    made = []
    for _ in range(num_ranks):
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Linear(300, 800), nn.PReLU(), nn.Linear(801, 33).double(), nn.Embedding(97, 31)])
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        made.append(Replica(net, optimizer, IN_STEP[0].make(), num_ranks))
    return made


def flip(tensor: Tensor, bit: int) -> None:
    memory = tensor.detach().view(-1).view(torch.uint8)
    memory[bit // 8] ^= 1 << (bit % 8)


def test_random_flips_are_found_within_a_pass_and_their_rank_is_named() -> None:
    seed = 1
    drawn, ranks = random.Random(seed), replicas(3)
    what = compared(ranks[0])
    assert what is not None
    tensors = [list(comparable(replica, what).items()) for replica in ranks]
    walks = [Walk() for _ in ranks]
    for number in range(NUM_FLIPS):
        culprit, index = drawn.randrange(3), drawn.randrange(len(tensors[0]))
        name, tensor = tensors[culprit][index]
        bit = drawn.randrange(8 * tensor.nbytes)
        flip(tensor, bit)
        looks, count = list[DriftLook](), 0
        while count < 64 and not (looks and judged(looks).others):
            count += 1
            slices = [walk.next([t for _, t in own]) for walk, own in zip(walks, tensors, strict=True)]
            looks = [looked(r, what, s, buffers=False) for r, s in zip(ranks, slices, strict=True)]
        assert judged(looks).others == [culprit], f"seed {seed}, flip {number}: bit {bit} of {name}"
        assert count <= walks[0].num_slices
        if number % 20 == 0:
            healthy = described(ranks[(culprit + 1) % 3], what)
            assert difference(healthy, described(ranks[culprit], what)) == name
        flip(tensor, bit)
    assert 3 <= walks[0].num_slices <= 6


def test_all_that_training_depends_on_is_looked_at() -> None:
    replica = replicas(2)[0]
    what = compared(replica)
    assert what is not None
    found = comparable(replica, what)
    parameters = dict(replica.model.named_parameters())
    assert [name for name in found if name.startswith("parameter")] == [f"parameter {name!r}" for name in parameters]
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert all(f"state {key!r} of parameter {name!r}" in found for name in parameters)
    assert len(found) == 4 * len(parameters)
    options: dict[str, Any] = settings(replica, what)
    assert options["option 'lr' of parameter group 0"] == 0.01
    assert options["option 'betas' of parameter group 0"] == [0.9, 0.999]
