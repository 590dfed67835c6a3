"""Three workers of a parameter server equal plain torch in float64, in the order of their pushes.

A record says, of each push, the batches, the version of the weights that it is of, and the version that it met.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.data.shard import DataShard
from polytempo.replay.replay import PushSeen, replay

pytestmark = pytest.mark.process

s = pt.strategies
WORKERS, STEPS, BATCH, SEED = 3, 12, 4, 3
X = torch.randn(90, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(X, X.view(90, 3, 2).sum(-1).argmax(-1))
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.8, weight_decay=0.01),
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1),
}


class Law(NamedTuple):
    """A strategy and its definition."""

    strategy: Strategy
    together: int = 1
    """Gradients of an update; the update's rate is this number over the workers' number."""
    power: int = 0
    """p, where a gradient that is τ updates old has 1/τᵖ of the rate."""
    strength: float = 0.0
    mean_square: float | None = None
    evenly: bool = False
    """True where each worker has one batch of a step."""


LAWS = [
    Law(s.async_sgd()),
    Law(s.ssp(bound=2), evenly=True),
    Law(s.staleness_aware(), power=1),
    Law(s.softsync(1), together=3),
    Law(s.softsync(1, scale="inverse"), together=3, power=1),
    Law(s.async_sgd(scale=pt.power(2)), power=2),
    Law(s.ssp(bound=2, scale=pt.power(2)), power=2, evenly=True),
    Law(s.dc_asgd(0.5, scale=pt.power(2)), strength=0.5, power=2),
    Law(s.dc_asgd(0.5), strength=0.5),
    Law(s.dc_asgd(2.0, mean_square=0.95), strength=2.0, mean_square=0.95),
]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def job(optimizer: str) -> pt.Job:
    return pt.Job(
        model=net,
        data=lambda folder: pt.Data(DATA, DATA),
        loss=nn.functional.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        batch_size=BATCH,
        lr=0.02,
    )


def dealt(evenly: bool) -> list[Any]:
    """The batches of two epochs by the numbers of their tickets."""
    size = WORKERS if evenly else 1
    shards = [DataShard(DATA, rank=rank, size=size, batch_size=BATCH, seed=SEED) for rank in range(size)]
    return [batch for _ in range(2) for step in zip(*map(list, shards), strict=True) for batch in step]


def gradient(weights: Tensor, batch: Sequence[Tensor]) -> Tensor:
    model = net()
    vector_to_parameters(weights, model.parameters())
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def by_hand(law: Law, optimizer: str, pushes: Iterable[PushSeen]) -> nn.Module:
    """The model after these pushes."""
    model, batches, waiting = net(), dealt(law.evenly), list[tuple[Tensor, float]]()
    steps = OPTIMIZERS[optimizer](model.parameters(), 1.0)
    versions, square = [parameters_to_vector(model.parameters()).detach()], torch.tensor(0.0)
    for push in pushes:
        ticket, tau = *push.tickets, len(versions) - 1 - push.basis
        assert tau == push.staleness
        found = gradient(versions[push.basis], batches[ticket])
        if law.strength:
            square = square if law.mean_square is None else law.mean_square * square + (1 - law.mean_square) * found**2
            divisor = 1.0 if law.mean_square is None else (square + 1e-7).sqrt()
            found = found + law.strength / divisor * found**2 * (versions[-1] - versions[push.basis])
        waiting.append((found, 1 / max(1, tau) ** law.power))
        if len(waiting) == law.together:
            weights = [weight for _, weight in waiting]
            mean = torch.stack([each * weight for each, weight in waiting]).sum(0) / sum(weights)
            for parameter, part in zip(
                model.parameters(), mean.split([p.numel() for p in model.parameters()]), strict=True
            ):
                parameter.grad = part.view_as(parameter)
            rate = sum(weights) / law.together if law.power else law.together / WORKERS
            steps.param_groups[0]["lr"] = 0.02 * rate
            steps.step()
            versions.append(parameters_to_vector(model.parameters()).detach().clone())
            waiting = []
    return model


@pytest.mark.parametrize("law", LAWS, ids=lambda law: str(law.strategy))
def test_workers_of_a_server_equal_plain_torch_in_the_order_of_their_pushes(law: Law, tmp_path: Path) -> None:
    for optimizer in ["sgd"] if law.strength else OPTIMIZERS:
        out = tmp_path / optimizer
        result = pt.run(job(optimizer), law.strategy, WORKERS, steps=STEPS, threads=1, seed=SEED, out=out)
        pushes = sorted(replay(out, job(optimizer), law.strategy).pushes, key=lambda push: push.entry)
        assert len(pushes) == WORKERS * STEPS
        model = by_hand(law, optimizer, pushes)
        expected = nn.functional.cross_entropy(model(X), DATA.tensors[1]).detach()
        assert result.loss == pytest.approx(float(expected), rel=1e-12)
