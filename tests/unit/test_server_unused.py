"""Parameters without a gradient in a push: shards leave them alone, as plain torch does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from polytempo.core.rule import Rule, Service, UpdateRule
from polytempo.native.library import available
from polytempo.server.layout import Parameter, part, place_, shard_map
from polytempo.server.message import COORDINATOR, Members, Push
from polytempo.server.rules.asynchronous import on_arrival, softsync, within
from polytempo.server.rules.synchronous_step import all_but, hardsync
from polytempo.server.shard.shard import Shard

MODEL = (Parameter("a", 5), Parameter("b", 4), Parameter("c", 6))
NUMEL = 15
LR = 0.1
OPTIMIZERS = {
    "sgd": (UpdateRule("sgd", weight_decay=0.1), partial(torch.optim.SGD, weight_decay=0.1)),
    "momentum": (
        UpdateRule("sgd", momentum=0.9, dampening=0.2, weight_decay=0.1),
        partial(torch.optim.SGD, momentum=0.9, dampening=0.2, weight_decay=0.1),
    ),
    "adam": (UpdateRule("adam", weight_decay=0.1), partial(torch.optim.Adam, weight_decay=0.1)),
    "adamw": (UpdateRule("adamw", weight_decay=0.1), partial(torch.optim.AdamW, weight_decay=0.1)),
    "adagrad": (
        UpdateRule("adagrad", lr_decay=0.1, weight_decay=0.1, eps=1e-10),
        partial(torch.optim.Adagrad, lr_decay=0.1, weight_decay=0.1),
    ),
}
TOGETHER = {"hardsync": hardsync(), "all_but": all_but(0), "softsync": softsync(1)}
ALONE = {"on_arrival": on_arrival(), "within": within(1)}
UNUSED = [(("c",), ("a", "c")), ((), ("b",)), (("b",), ("b", "c")), (("a", "b", "c"), ("a", "b", "c")), (("a",), ())]
"""The unused parameters of the two workers in each step: some in one push, some in both, once all."""


def gradients() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(5)
    drawn = []
    for unused in UNUSED:
        pair = torch.randn(2, NUMEL, generator=random, dtype=torch.float64)
        for gradient, names in zip(pair, unused, strict=True):
            for parameter, values in zip(MODEL, gradient.split([p.numel for p in MODEL]), strict=True):
                values *= parameter.name not in names
        drawn.append((pair[0], pair[1]))
    return drawn


def plain(optimizer: str, steps: Sequence[tuple[Tensor, Sequence[str]]]) -> Tensor:
    weights = [torch.ones(p.numel, dtype=torch.float64, requires_grad=True) for p in MODEL]
    made = OPTIMIZERS[optimizer][1](weights, lr=LR)
    for gradient, unused in steps:
        for parameter, values, own in zip(MODEL, weights, gradient.split([p.numel for p in MODEL]), strict=True):
            values.grad = None if parameter.name in unused else own.clone()
        made.step()
    return torch.cat([values.detach() for values in weights])


def served(rule: Rule, optimizer: str, shards: int = 2, *, native: bool, saves: bool = False) -> Tensor:
    service = Service(rule, OPTIMIZERS[optimizer][0])
    spans = shard_map(MODEL, shards)
    flat = torch.ones(NUMEL, dtype=torch.float64)
    made = [Shard(s, MODEL, each, part(flat, each), service, native=native) for s, each in enumerate(spans)]
    for shard in made:
        shard.apply(Members(COORDINATOR, 1, 1, ((0, 1), (1, 1))))
    for step, (pair, unused) in enumerate(zip(gradients(), UNUSED, strict=True), 1):
        for worker in (0, 1):
            for s, shard in enumerate(made):
                gradient, names = part(pair[worker], spans[s]), tuple(unused[worker])
                shard.apply(Push(worker, 1, step, step, shard.version, 1, (LR,), (), gradient, unused=names))
                if saves:
                    made[s] = Shard(s, MODEL, spans[s], part(flat, spans[s]), service, native=native)
                    made[s].load(*shard.dump())
    for shard, each in zip(made, spans, strict=True):
        place_(flat, each, shard.weights)
    return flat


@pytest.mark.parametrize(
    "native",
    [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="no native core here"))],
    ids=["torch ops", "kernel"],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", TOGETHER)
def test_a_sum_has_a_gradient_where_any_of_its_pushes_has(rule: str, optimizer: str, native: bool) -> None:
    steps = [
        ((one + other) / 2, [name for name in unused[0] if name in unused[1]])
        for (one, other), unused in zip(gradients(), UNUSED, strict=True)
    ]
    found = served(TOGETHER[rule], optimizer, native=native)
    torch.testing.assert_close(found, plain(optimizer, steps), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", ALONE)
def test_each_push_is_a_step_of_the_parameters_that_it_has(rule: str, optimizer: str) -> None:
    steps = [
        (gradient, names)
        for pair, unused in zip(gradients(), UNUSED, strict=True)
        for gradient, names in zip(pair, unused, strict=True)
    ]
    found = served(ALONE[rule], optimizer, native=False)
    torch.testing.assert_close(found, plain(optimizer, steps), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", [softsync(1), hardsync()], ids=["softsync", "hardsync"])
def test_a_restored_shard_goes_on_alike(rule: Rule) -> None:
    assert torch.equal(served(rule, "adamw", native=False, saves=True), served(rule, "adamw", native=False))


def test_a_residual_moves_a_parameter_that_its_batch_did_not_use() -> None:
    """An encoded gradient may bring an older one's remainder: then the parameter has a gradient."""
    shard = Shard(0, MODEL, shard_map(MODEL, 1)[0], torch.ones(NUMEL), Service(on_arrival(), OPTIMIZERS["sgd"][0]))
    shard.apply(Members(COORDINATOR, 1, 1, ((0, 1),)))
    gradient = torch.zeros(NUMEL)
    gradient[5] = 1.0
    shard.apply(Push(0, 1, 1, 1, 0, 1, (LR,), (), gradient, unused=("a", "b", "c")))
    torch.testing.assert_close(shard.weights[:5], torch.ones(5))
    torch.testing.assert_close(shard.weights[5], torch.tensor(1 - LR * 1.1))
    torch.testing.assert_close(shard.weights[6:9], torch.full((3,), 1 - LR * 0.1))
    torch.testing.assert_close(shard.weights[9:], torch.ones(6))
