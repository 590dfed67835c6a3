"""Runs a strategy on a tiny model under the virtual clock, with batches that are known in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.cluster import Cluster, Link
from polytempo.core import Port, Strategy
from polytempo.training.step.parameter_exchange import Commit
from polytempo.training.step.replica import Replica
from polytempo.worlds import Outcome, VirtualWorld

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}

HOST = Cluster(network=Link(1e-5, 1e9), workers_per_host=2)


class Setting(NamedTuple):
    """The trained model, apart from the strategy."""

    optimizer: str = "momentum"
    dtype: torch.dtype = torch.float64
    bucket_bytes: int = 25 * 2**20


def model(dtype: torch.dtype) -> nn.Module:
    """5 - 7 - 3 with sizes that no number of ranks divides."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes 1 ms to note that it was called
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


@cache
def joined_batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The global batch of a step: 24 samples. All ranks of all runs read the same tensors."""
    random = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(24, 5, generator=random, dtype=torch.float64)
    targets = torch.stack([inputs.sum(1).sin(), inputs[:, 0] * inputs[:, 1], inputs[:, 2]], dim=1)
    return inputs.to(dtype), targets.to(dtype)


def shares(num_ranks: int, uneven: bool) -> list[slice]:
    """Each rank's part of the joined batch; uneven ones differ by several samples."""
    cuts = [24 * i // num_ranks for i in range(num_ranks + 1)]
    if uneven:
        cuts[1:-1] = [min(23, c + 1 + i % 2) for i, c in enumerate(cuts[1:-1])]
    return [slice(a, b) for a, b in pairwise(cuts)]


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over samples of the squared error."""
    return ((net(batch[0]) - batch[1]) ** 2).sum(1).mean()


class Rank:
    """One rank: a model, its optimizer, its replica, its part of every batch."""

    def __init__(
        self,
        strategy: Strategy,
        rank: int,
        num_ranks: int,
        setting: Setting,
        uneven: bool,
        commit: Commit | None = None,
    ) -> None:
        self.model = model(setting.dtype)
        self.optimizer = OPTIMIZERS[setting.optimizer](self.model.parameters())
        size = setting.bucket_bytes
        self.replica = Replica(self.model, self.optimizer, strategy, num_ranks, bucket_bytes=size, commit=commit)
        self.part = shares(num_ranks, uneven)[rank]
        self.dtype = setting.dtype
        self.history: list[Tensor] = []

    async def steps(self, port: Port, first: int, last: int) -> None:
        """Steps `first` to `last` - 1, remembering the parameters after each."""
        for step in range(first, last):
            await port.mark(step)
            inputs, targets = (t[self.part] for t in joined_batch(step, self.dtype))
            self.optimizer.zero_grad()
            await port.compute(lambda x=inputs, y=targets: loss_of(self.model, (x, y)).backward(), 1e6)
            for bucket in self.replica.buckets:
                await self.replica.exchange(port, bucket, share=len(inputs) / 24)
            self.optimizer.step()
            await self.replica.finish_step(port)
            self.history.append(flat(self.model))


def flat(net: nn.Module) -> Tensor:
    """All parameters in one vector, in memory of its own."""
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone()


def run(
    strategy: Strategy,
    num_ranks: int,
    num_steps: int,
    setting: Setting = Setting(),
    *,
    uneven: bool = False,
) -> tuple[list[Rank], Outcome[None]]:
    """`num_steps` steps on `num_ranks` virtual ranks."""
    ranks = [Rank(strategy, rank, num_ranks, setting, uneven) for rank in range(num_ranks)]

    async def program(port: Port) -> None:
        await ranks[port.rank].steps(port, 0, num_steps)
        await ranks[port.rank].replica.settle()

    return ranks, VirtualWorld(HOST, num_ranks).run(program)


def plain_torch(num_steps: int, setting: Setting = Setting()) -> list[Tensor]:
    """The parameters after each step of the usual loop, on the joined batch."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    history = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(net, joined_batch(step, setting.dtype)).backward()
        optimizer.step()
        history.append(flat(net))
    return history
