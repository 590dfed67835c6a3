"""Real worker processes for tests: they start in milliseconds, and an error in one fails the test with its log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from polytempo.engines.engine import Result
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.training import trainer
from polytempo.worlds import ProcessWorld

LOADED = (torch._dynamo, trainer)
"""Slow to load: once here instead of once in every worker (optimizers load the first when they are made)."""

Batch = tuple[Tensor, Tensor]


def together(
    num_ranks: int,
    work: Callable[[ProcessWorld], Result],
    *,
    timeout_s: float = 100,
    mesh: Mapping[str, int] | None = None,
) -> list[Any]:
    """The value of `work(world)` on each of `num_ranks` processes, in the order of ranks."""

    def serve(rank_info: RankInfo) -> Result:
        return work(init(timeout_s=60, quiet=True, mesh=mesh))

    return launch(serve, num_ranks, threads=1, timeout_s=timeout_s)


def small(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """4 - 5 - 3, the same everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batches(num_steps: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Global batches of 12 samples, known in advance."""
    random = torch.Generator().manual_seed(7)
    return [
        (torch.randn(12, 4, generator=random).to(dtype), torch.randn(12, 3, generator=random).to(dtype))
        for _ in range(num_steps)
    ]


def mine(whole: Iterable[Batch], world: ProcessWorld) -> Iterator[Batch]:
    """This rank's equal part of every global batch."""
    for inputs, targets in whole:
        yield inputs.chunk(world.size)[world.rank], targets.chunk(world.size)[world.rank]


def squared(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error."""
    return ((output - target) ** 2).mean()


def loop(net: nn.Module, optimizer: Optimizer, data: Iterable[Batch]) -> None:
    """The plain training loop, which `attach` must leave as it is."""
    for inputs, targets in data:
        optimizer.zero_grad()
        squared(net(inputs), targets).backward()
        optimizer.step()


def flat(net: nn.Module) -> list[float]:
    """All parameters as one list of numbers; JSON keeps each bit of them."""
    return [float(value) for parameter in net.parameters() for value in parameter.detach().flatten()]


def close(a: list[float], b: list[float], tolerance: float) -> bool:
    """True if two lists of numbers are equal up to `tolerance` relative to the norm of the second."""
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return x.shape == y.shape and bool((x - y).norm() <= tolerance * y.norm())


def assert_as_alone(work: Callable[[ProcessWorld], Result], num_steps: int, **options: float) -> None:
    """Run `work` on two ranks. Both must return the parameters of `loop` in one process, by SGD with `options`."""
    alone = small()
    loop(alone, SGD(alone.parameters(), **options), batches(num_steps))
    first, second = together(2, work)
    assert first == second
    assert close(first, flat(alone), 1e-12)
