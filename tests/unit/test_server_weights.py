"""A shard's tensors: an update that is made while its gradient is looked at is the update that would have been made."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polytempo.core.rule import Add, UpdateRule
from polytempo.native.library import available
from polytempo.server.layout import Parameter, Span, parameter_parts
from polytempo.server.tensors.optimizer import Optimizer
from polytempo.server.tensors.weights import Weights

NUMEL = 300
LRS = (0.5, 0.25)
PARTS = tuple(parameter_parts((Parameter("w", 200), Parameter("b", NUMEL - 200, group=1)), (Span(0, NUMEL),)))


def weights(rule: UpdateRule | None = None) -> Weights:
    rule = rule or UpdateRule("sgd", weight_decay=0.1)
    return Weights(
        torch.linspace(-1, 1, NUMEL),
        Optimizer(rule, PARTS, torch.float32, native=available()),
        lambda numel, dtype: torch.empty(numel, dtype=dtype),
        keeps_reads=False,
    )


def gradients(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(NUMEL, generator=generator) for _ in range(count)]


def step(held: Weights, gradient: Tensor, factor: float = 1.0, *, looks: bool = True) -> Tensor:
    """A shard's step by a push that is an update of its own."""
    if looks:
        assert held.examine(gradient, LRS) == -1
    held.add(gradient, held.weigh(Add(0, factor), LRS))
    held.update(2.0)
    held.keep_sum()
    return held.present.clone()


def in_use(held: Weights) -> int:
    return sum(1 for holders in held.buffers.holders if holders)


def test_looking_changes_no_bit() -> None:
    """Nor does it where a factor changes, which the fourth one shows."""
    looking, blind = weights(), weights()
    for gradient, factor in zip(gradients(8), (1, 1, 1, 0.5, 1, 1, 1, 1), strict=True):
        assert torch.equal(step(looking, gradient, factor), step(blind, gradient, factor, looks=False))
        assert looking.version == blind.version
        assert in_use(looking) == 1
    assert len(looking.buffers.tensors) <= 2


@pytest.mark.parametrize("index", [0, 199, 200, 299])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_no_number_is_found_and_nothing_changes(index: int, bad: float) -> None:
    held = weights()
    before = [step(held, gradient) for gradient in gradients(2)][-1]
    spoiled = torch.ones(NUMEL)
    spoiled[index] = bad
    assert held.examine(spoiled, LRS) == index
    assert torch.equal(held.present, before)
    assert (held.version, in_use(held)) == (2, 1)


def test_an_update_that_was_foreseen_and_does_not_come_leaves_nothing() -> None:
    held = weights()
    first, second, third = gradients(3)
    before = step(held, first)
    assert held.examine(second, LRS) == -1
    held.keep_sum()  # the push was dropped
    assert torch.equal(held.present, before)
    assert in_use(held) == 1
    other = weights()
    step(other, first)
    assert torch.equal(step(held, third), step(other, third))


def test_a_lent_buffer_stays_as_it_is() -> None:
    held = weights()
    first, second, third = gradients(3)
    step(held, first)
    lent = held.lend_present(0, 1)
    before = lent.clone()
    step(held, second)
    step(held, third)
    assert torch.equal(lent, before)
    assert held.settle(0) == [1]
    assert in_use(held) == 1


def test_sums_are_not_foreseen() -> None:
    looking, blind = weights(), weights()
    step(looking, gradients(1)[0])
    step(blind, gradients(1)[0])
    for held, looks in ((looking, True), (blind, False)):
        for gradient in gradients(3):
            assert not looks or held.examine(gradient, LRS) == -1
            held.add(gradient, held.weigh(Add(0), LRS))
            held.keep_sum()
        held.update(3.0)
    assert torch.equal(looking.present, blind.present)
