"""The owner of the weight decay where workers step and push gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from polytempo import strategies
from polytempo.core.rule import Service, UpdateRule
from polytempo.training.model.local_decay import LocalDecay
from polytempo.training.served.shard_rule import shard_rule_of


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, 5)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]


def gradients(given: list[nn.Parameter]) -> None:
    """The last one has none."""
    for parameter in given[:-1]:
        parameter.grad = parameter.detach().cos()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda given, up: SGD(given, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.3, maximize=up, foreach=False),
        lambda given, up: Adam(given, lr=0.1, weight_decay=0.3, maximize=up, foreach=False),
        lambda given, up: Adagrad(given, lr=0.1, weight_decay=0.3, maximize=up, foreach=False),
        lambda given, up: AdamW(given, lr=0.1, weight_decay=0.3, maximize=up, foreach=False),
    ],
    ids=["sgd", "adam", "adagrad", "adamw"],
)
def test_a_local_step_has_the_bits_that_it_had(make: Any, maximize: bool) -> None:
    own, plain = parameters(), parameters()
    optimizer, reference = make(own, maximize), make(plain, maximize)
    decay = LocalDecay(optimizer)
    for _ in range(4):
        for given in (own, plain):
            gradients(given)
        decay.add_()
        optimizer.step()
        reference.step()
    for mine, theirs in zip(own, plain, strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_pushed_holds_the_decay_of_each_group() -> None:
    first, second, third = parameters()
    groups = [{"params": [first], "weight_decay": 0.5}, {"params": [second, third]}]
    decay = LocalDecay(SGD(groups, lr=0.1))
    gradients([first, second, third])
    decay.add_()
    assert first.grad is not None
    assert second.grad is not None
    assert torch.equal(first.grad, first.detach().cos() + 0.5 * first.detach())
    assert torch.equal(second.grad, second.detach().cos())
    assert third.grad is None


def service(**options: Any) -> Service:
    server = strategies.downpour(**options).server
    assert server is not None
    return server


def sgd(**options: Any) -> Optimizer:
    return SGD(parameters(), lr=0.1, **options)


@pytest.mark.parametrize(
    ("options", "optimizer", "expected"),
    [
        ({}, sgd(), UpdateRule("adagrad", eps=0.0)),
        ({}, sgd(weight_decay=0.1), UpdateRule("adagrad", eps=0.0)),  # the push contains it
        ({"optimizer": "sgd", "lr": 0.5}, sgd(maximize=True), UpdateRule("sgd", 0.5, maximize=True)),
        ({"optimizer": "job"}, sgd(momentum=0.9, weight_decay=0.1), UpdateRule("sgd", momentum=0.9)),
        ({"optimizer": "job"}, AdamW(parameters(), weight_decay=0.1), UpdateRule("adamw", weight_decay=0.1)),
        ({"optimizer": "adamw"}, AdamW(parameters(), weight_decay=0.1), UpdateRule("adamw", weight_decay=0.1)),
        ({"optimizer": "adamw"}, sgd(weight_decay=0.1), UpdateRule("adamw")),
        ({}, AdamW(parameters(), weight_decay=0.0), UpdateRule("adagrad", eps=0.0)),
        ({}, RMSprop(parameters()), UpdateRule("adagrad", eps=0.0)),  # which workers alone need to know
    ],
)
def test_what_the_shards_apply(options: dict[str, Any], optimizer: Optimizer, expected: UpdateRule) -> None:
    assert shard_rule_of(service(**options), optimizer) == expected


@pytest.mark.parametrize("named", ["adagrad", "sgd", "adam"])
def test_decay_that_would_be_dropped_is_refused(named: str) -> None:
    with pytest.raises(ValueError, match=rf'by \[0.1\], and its shards apply {named}, .*; use optimizer="adamw"'):
        shard_rule_of(service(optimizer=named), AdamW(parameters(), weight_decay=0.1))


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="whether the weight decay of RMSprop is a part of the gradient is not known"):
        shard_rule_of(service(), RMSprop(parameters(), weight_decay=0.1))
    first, second, third = parameters()
    groups = [{"params": [first], "maximize": True}, {"params": [second, third]}]
    with pytest.raises(ValueError, match="maximize must be the same in all groups"):
        shard_rule_of(service(), SGD(groups, lr=0.1))
    decays = [{"params": [first], "weight_decay": 0.2}, {"params": [second, third], "weight_decay": 0.1}]
    with pytest.raises(ValueError, match=r"by \[0.1, 0.2\]"):
        shard_rule_of(service(optimizer="adamw"), AdamW(decays))


def test_elsewhere_the_shards_decay() -> None:
    for strategy in (strategies.async_sgd(), strategies.staleness_aware(), strategies.backup_workers()):
        assert strategy.server is not None
        assert shard_rule_of(strategy.server, sgd(weight_decay=0.1)) == UpdateRule("sgd", weight_decay=0.1)
