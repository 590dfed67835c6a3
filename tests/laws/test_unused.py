"""Parameters that steps leave out: unused ones stay as in plain torch, under every strategy."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.catalogue import ROWS, STAGED, Row, label
from laws.harness import HOST, flat, joined_batch, loss_of, shares
from polytempo.core import Port
from polytempo.training.step.replica import Replica
from polytempo.worlds import VirtualWorld
from some_cases import some_of

STEPS, RANKS = 8, 3
DTYPE = torch.float64
VOTES = ("sign_sgd(feedback=False", "distributed_lion(")
"""One bit has no word for zero: an odd number of ranks moves unused parameters."""


class Branches(nn.Module):
    """`sometimes` is for samples that begin with more than 1.5: in a step for two ranks, one, or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sometimes, self.never, self.last = (
            nn.Linear(*sizes, dtype=DTYPE) for sizes in ((5, 7), (7, 7), (7, 7), (7, 3))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, chosen = self.first(inputs).tanh(), inputs[:, :1] > 1.5
        return self.last(hidden + chosen * self.sometimes(hidden) if chosen.any() else hidden)


def adamw(net: nn.Module) -> AdamW:
    return AdamW(net.parameters(), lr=0.01, weight_decay=0.3)


def trained(row: Row) -> list[Replica]:
    strategy, cuts = row.make(), shares(RANKS, uneven=True)
    nets = [Branches() for _ in range(RANKS)]
    replicas = [Replica(net, adamw(net), strategy, RANKS) for net in nets]

    async def program(port: Port) -> None:
        replica, part = replicas[port.rank], cuts[port.rank]
        for step in range(STEPS):
            inputs, targets = (each[part] for each in joined_batch(step, DTYPE))
            replica.optimizer.zero_grad()
            loss_of(replica.model, (inputs, targets)).backward()
            for bucket in replica.buckets:
                await replica.exchange(port, bucket, share=len(inputs) / 24)
            await replica.leave_unused(port)
            replica.optimizer.step()
            await replica.finish_step(port)
        await replica.settle()

    VirtualWorld(HOST, RANKS).run(program)
    return replicas


def on_the_joined_batch() -> nn.Module:
    net = Branches()
    optimizer = adamw(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, joined_batch(step, DTYPE)).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("row", some_of(ROWS, 1), ids=label)
def test_parameters_that_no_rank_uses_stay(row: Row) -> None:
    first, whole = Branches(), on_the_joined_batch()
    for replica in trained(row):
        never = replica.model.get_submodule("never")
        if not str(replica.strategy).startswith(VOTES):
            torch.testing.assert_close(flat(never), flat(first.never), rtol=0, atol=1e-15)
        if row.joined:
            torch.testing.assert_close(flat(replica.model), flat(whole), rtol=0, atol=1e-12)


def test_the_batches_use_the_branch_on_two_ranks_on_one_and_on_none() -> None:
    cuts = shares(RANKS, uneven=True)
    users = [sum(bool((joined_batch(step, DTYPE)[0][cut, 0] > 1.5).any()) for cut in cuts) for step in range(STEPS)]
    assert {0, 1, 2} <= set(users)


# ---------------------------------------------------------------------- stages


class Apart(nn.Module):
    """The answer of `apart` is used, but no gradient goes there."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.apart = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.near(inputs) + 0.1 * self.apart(inputs).detach())


class Ends(nn.Module):
    """Both ends have a weight that no gradient reaches, perhaps the same one."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        if tied:
            self.last.weight = self.first.weight
        self.middle = nn.Sequential(*[Apart() for _ in range(4)])

    def forward(self, inputs: Tensor) -> Tensor:
        between = self.middle(inputs + 0.1 * self.first(inputs).detach())
        return between + 0.1 * self.last(between).detach()


@pytest.mark.parametrize("row", some_of(STAGED, 0, 4), ids=label)
def test_stages_with_replicas_leave_what_no_replica_uses(row: Row) -> None:
    strategy, held = row.make(), list[tuple[nn.Parameter, Tensor]]()
    x, y = torch.randn(2, 48, 6, generator=torch.Generator().manual_seed(0)).unbind()
    tied = row.name in ("gpipe", "one_f_one_b", "interleaved", "zero_bubble")

    def sgd(parameters: Iterable[nn.Parameter], lr: float) -> SGD:
        own = list(parameters)
        held.extend((p, p.detach().clone()) for p in own)
        return SGD(own, lr=lr, momentum=0.9, weight_decay=0.1)

    job = pt.Job(
        model=lambda: Ends(tied),
        data=lambda path: pt.Data(TensorDataset(x, y)),
        loss=nn.functional.mse_loss,
        optimizer=sgd,
        batch_size=8,
        lr=0.01,
    )
    pt.simulate(job, strategy, 2 * strategy.stages, pt.cluster.one_host(), steps=5, threads=1)
    near = [p.detach() for name, p in Ends(tied).named_parameters() if "near" in name]
    moved = [first for p, first in held if not torch.allclose(p, first, rtol=0, atol=1e-7)]
    assert len(moved) >= 2 * len(near), "each replica trains them"
    assert all(any(torch.equal(first, other) for other in near) for first in moved)
