"""Laws of workers that compute together: as each worker alone, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo import strategies as s
from polytempo.core import NotFinite, Strategy
from polytempo.jobs import find
from polytempo.spec.job import Job

DIGITS = find("digits")
UNEVEN = pt.cluster.ethernet(gflops=0.2, stragglers=pt.cluster.lognormal(0.5))
TOLERANCE = 1e-9
"""The tolerance of parameters in float64 after the steps below, as a part of the largest one."""


def made(random: int, samples: int) -> torch.utils.data.TensorDataset:
    """Samples without two equal numbers, so that no rounding decides which of two a codec keeps."""
    generator = torch.Generator().manual_seed(random)
    inputs = torch.randn(samples, 9, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, torch.randint(5, (samples,), generator=generator))


SMALL = replace(
    DIGITS,
    model=lambda: nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 5)).double(),
    data=lambda folder: pt.Data(made(1, 90), made(2, 20)),
)


def final(job: Job, strategy: Strategy, *, batched: bool, workers: int = 4, **options: Any) -> tuple[Any, Tensor]:
    """The result, and the model that is handed out: seen by a loss that looks at it last."""
    seen: list[nn.Module] = []

    def model() -> nn.Module:
        made = job.model()
        seen.append(made)
        return made

    given = {"steps": 7, "batch_size": 3} | options
    result = pt.simulate(replace(job, model=model), strategy, workers, UNEVEN, batched=batched, **given)
    flats = [torch.cat([p.detach().reshape(-1) for p in each.parameters()]) for each in seen[-workers:]]
    return result, torch.stack(flats)


@pytest.mark.parametrize(
    "strategy",
    [
        s.sync_sgd(),
        s.sync_sgd(route=pt.collectives.ring),
        s.parameter_averaging(period=3),
        s.diloco(period=3),
        s.gossip(overlap=True),
        s.slowmo(period=4, inner=s.gossip()),
        s.delayed_sgd(delay=3),
        s.acco(),
        s.adasum(of="updates"),
        s.top_k_sgd(0.2, exact_below=0),
        s.dgc(ratio=0.2, momentum=0.0, exact_below=10),
    ],
    ids=str,
)
def test_workers_that_compute_together_do_what_each_does_alone(strategy: Strategy) -> None:
    """`benchmarks/virtual/agreement.py` has all strategies."""
    (alone, apart), (result, together) = (final(SMALL, strategy, batched=batched) for batched in (False, True))
    torch.testing.assert_close(together, apart, rtol=0, atol=TOLERANCE * float(apart.abs().max()))
    assert (result.seconds, result.trace_hash) == (alone.seconds, alone.trace_hash)
    assert result.train_loss == pytest.approx(alone.train_loss, rel=1e-9)


def adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr / 10, weight_decay=0.1)


def groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": lr / 2}, {"params": others, "momentum": 0.5}], lr=lr)


def asgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.ASGD(parameters, lr=lr)


def falling(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


class WithUnused(nn.Module):
    """A parameter that the loss does not reach, a frozen one, one without dimensions, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.frozen = nn.Linear(9, 5), nn.Linear(3, 3), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen.requires_grad_(False)
        self.again = self.first

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.frozen(self.again(inputs)) * self.scale
        return found


@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.parameter_averaging(period=2)], ids=str)
@pytest.mark.parametrize(
    "job",
    [
        replace(SMALL, optimizer=adam),
        replace(SMALL, optimizer=groups, schedule=falling),
        replace(SMALL, optimizer=asgd),
        replace(SMALL, model=lambda: WithUnused().double(), optimizer=adam),
    ],
    ids=["adam", "groups_and_schedule", "another_optimizer", "unused"],
)
def test_with_other_optimizers_and_models(job: Job, strategy: Strategy) -> None:
    (_, apart), (_, together) = (final(job, strategy, batched=batched, workers=3) for batched in (False, True))
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-7 * float(apart.abs().max()))


def noisy(inputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(inputs + torch.randn_like(inputs), target)


def by_value(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() if output.sum() > 0 else nn.functional.cross_entropy(output, target)


def with_layer(layer: Callable[[], nn.Module]) -> Job:
    return replace(DIGITS, model=lambda: nn.Sequential(nn.Linear(64, 8), layer(), nn.Linear(8, 10)))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 8, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = inputs + self.rows(torch.zeros(len(inputs), dtype=torch.int64))
        return found


@pytest.mark.parametrize(
    ("job", "strategy", "text"),
    [
        (with_layer(lambda: nn.BatchNorm1d(8)), s.sync_sgd(), "BatchNorm1d '1' has running statistics; use GroupNorm"),
        (with_layer(lambda: nn.Dropout(0.5)), s.sync_sgd(), "Dropout '1' draws random numbers"),
        (with_layer(Counting), s.sync_sgd(), "buffer '1.calls' changes in a forward pass; leave out batched"),
        (with_layer(Table), s.sync_sgd(), "gradients of 1.rows.weight are rows"),
        (replace(DIGITS, loss=noisy), s.sync_sgd(), "vmap: called random operation.*leave out batched"),
        (replace(DIGITS, loss=by_value), s.sync_sgd(), "control flow.*leave out batched"),
        (DIGITS, s.downpour(), "has a parameter server.*leave out batched"),
        (DIGITS, s.hogwild(), "has one copy of the parameters.*leave out batched"),
        (DIGITS, s.sync_sgd(route=pt.collectives.invariant(4)), "computes a batch in slices.*leave out batched"),
        (DIGITS, s.gpipe(stages=2), "cuts the model into stages.*leave out batched"),
    ],
)
def test_what_cannot_be_computed_together_is_refused(job: Job, strategy: Strategy, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pt.simulate(job, strategy, 4, steps=2, batch_size=4, batched=True)


def test_what_is_not_finite_is_named_as_without() -> None:
    def bad(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) * 1e38 * 1e38

    said = []
    for batched in (False, True):
        with pytest.raises(NotFinite) as caught:
            pt.simulate(replace(DIGITS, loss=bad), s.local_sgd(), 3, steps=2, batch_size=4, batched=batched)
        said.append((caught.value.step, caught.value.rank, caught.value.parameter))
    assert said[0] == said[1]


def test_meta_has_nothing_to_compute_together() -> None:
    with pytest.raises(ValueError, match="PT1304"):
        pt.simulate(DIGITS, s.sync_sgd(), 4, steps=2, batched=True, meta=True)
