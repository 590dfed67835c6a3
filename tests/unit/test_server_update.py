"""The optimizer inside a shard: the same steps as torch.optim, out of place, by torch ops and by the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from polytempo.core.rule import UpdateRule
from polytempo.native.library import available
from polytempo.server.layout import Parameter, ParameterPart
from polytempo.server.tensors.optimizer import Moments, Optimizer, StepNumber, Term, first_unfinite, init

NUMEL, STEPS = 1031, 4

RULES = {
    "sgd": UpdateRule("sgd", lr=0.1),
    "sgd, decayed": UpdateRule("sgd", lr=0.1, weight_decay=0.03),
    "sgd, uphill": UpdateRule("sgd", lr=0.1, maximize=True, weight_decay=0.03),
    "momentum": UpdateRule("sgd", lr=0.1, momentum=0.9),
    "momentum, dampened": UpdateRule("sgd", lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "nesterov": UpdateRule("sgd", lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": UpdateRule("adagrad", lr=0.1, eps=1e-10),
    "adagrad, decayed": UpdateRule("adagrad", lr=0.1, eps=1e-10, lr_decay=0.1, initial=0.5, weight_decay=0.02),
    "adam": UpdateRule("adam", lr=0.01),
    "adam, decayed": UpdateRule("adam", lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
    "adamw": UpdateRule("adamw", lr=0.01, weight_decay=0.1),
    "adamw, uphill": UpdateRule("adamw", lr=0.01, weight_decay=0.1, maximize=True),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
kernel = pytest.mark.skipif(not available(), reason="no native core here")
both_ways = pytest.mark.parametrize("native", [False, pytest.param(True, marks=kernel)], ids=["torch ops", "kernel"])


def torch_optimizer(rule: UpdateRule, weights: Tensor) -> torch.optim.Optimizer:
    common = {"lr": rule.lr, "weight_decay": rule.weight_decay, "foreach": False, "maximize": rule.maximize}
    if rule.kind == "sgd":
        own = {"momentum": rule.momentum, "dampening": rule.dampening, "nesterov": rule.nesterov}
        return torch.optim.SGD([weights], **common, **own)
    if rule.kind == "adagrad":
        own = {"lr_decay": rule.lr_decay, "initial_accumulator_value": rule.initial, "eps": rule.eps}
        return torch.optim.Adagrad([weights], **common, **own)
    kind = torch.optim.Adam if rule.kind == "adam" else torch.optim.AdamW
    return kind([weights], **common, betas=rule.betas, eps=rule.eps)


def empty(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.full((numel,), math.nan, dtype=dtype)


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    scale = torch.logspace(-6, 2, NUMEL, dtype=dtype)
    return [torch.randn(NUMEL, generator=generator, dtype=dtype) * scale for _ in range(STEPS)]


def weights_at_first(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(3), dtype=dtype)


def alone(rule: UpdateRule, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights after plain torch."""
    weights = weights_at_first(dtype)
    optimizer = torch_optimizer(rule, weights)
    for gradient in gradients(dtype):
        weights.grad = gradient
        optimizer.step()
    return weights


def part_of(begin: int, end: int, group: int) -> ParameterPart:
    return ParameterPart(Parameter(f"w{begin}", end - begin, group), begin, end)


def optimizer_of(rule: UpdateRule, native: bool, dtype: torch.dtype = torch.float32) -> Optimizer:
    return Optimizer(rule, [part_of(0, NUMEL, 0)], dtype, native=native)


def in_shard(
    rule: UpdateRule,
    native: bool,
    dtype: torch.dtype = torch.float32,
    terms_of: Callable[[Tensor], tuple[list[Term], float]] = lambda gradient: ([Term(gradient, 1.0)], 1.0),
) -> Tensor:
    """The weights after the same steps in a shard, every second one in place."""
    weights, optimizer = weights_at_first(dtype), optimizer_of(rule, native, dtype)
    moments = init(rule, NUMEL, dtype, empty)
    for step, gradient in enumerate(gradients(dtype), 1):
        out = weights if step % 2 else empty(NUMEL, dtype)
        before = weights.clone()
        terms, divisor = terms_of(gradient)
        kept = [term.gradient.clone() for term in terms]
        optimizer.step_(weights, out, terms, divisor, moments, StepNumber(step), ())
        assert out is weights or torch.equal(weights, before), "weights that are lent must stay"
        assert all(torch.equal(term.gradient, old) for term, old in zip(terms, kept, strict=True))
        weights = out
    return weights


@every_rule
def test_torch_ops_give_the_bits_of_plain_torch(rule: UpdateRule) -> None:
    assert torch.equal(in_shard(rule, native=False), alone(rule))


@kernel
@every_rule
def test_the_kernel_is_near_plain_torch(rule: UpdateRule) -> None:
    """The largest elements move by 100 and more in f32; plain torch in f64, rounded, is as near."""
    torch.testing.assert_close(in_shard(rule, native=True), alone(rule), rtol=1e-5, atol=1e-6)


@kernel
@every_rule
def test_in_f64_both_ways_agree(rule: UpdateRule) -> None:
    found = [in_shard(rule, native, torch.float64) for native in (False, True)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


@kernel
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_large_weights_get_the_same_bits_past_the_caches(kind: Literal["sgd", "adam"]) -> None:
    """Large outputs, from 24 MiB on, are written past the caches where they are not the weights; here one begins
    between two lines."""
    numel = (24 << 20) // 4 + 1000
    optimizer = Optimizer(UpdateRule(kind, lr=0.1), [part_of(0, numel, 0)], torch.float32, native=True)
    weights = torch.linspace(-3, 5, numel)
    gradient, out = weights.cos(), torch.empty(numel + 3)[3:]
    for target in (out, weights):
        moments = init(optimizer.rule, numel, out.dtype, empty)
        optimizer.step_(weights, target, [Term(gradient, 1.0)], 3.0, moments, StepNumber(1), ())
    assert torch.equal(out, weights)


@both_ways
def test_several_gradients_are_a_weighted_mean(native: bool) -> None:
    """(3 g/2 + g/2) / 2 = g."""
    rule = RULES["momentum"]
    found = in_shard(rule, native, terms_of=lambda g: ([Term(g.clone(), 1.5), Term(g.clone(), 0.5)], 2.0))
    torch.testing.assert_close(found, in_shard(rule, native), rtol=1e-6, atol=1e-6)


@both_ways
def test_no_gradient_is_a_gradient_of_zeros(native: bool) -> None:
    """The momentum goes on: w = 0 - 1·(0.5·1) where the first step left a momentum of 1."""
    rule = UpdateRule("sgd", lr=1.0, momentum=0.5)
    optimizer = Optimizer(rule, [part_of(0, 2, 0)], torch.float32, native=native)
    moments = Moments(torch.ones(2), None)
    weights = torch.zeros(2)
    optimizer.step_(weights, weights, [], 1.0, moments, StepNumber(2), ())
    assert weights.tolist() == [-0.5, -0.5]


@both_ways
@pytest.mark.parametrize("every", [2, 3])
def test_delayed_momentum_is_nesterovs_step_by_the_mean_of_several_gradients(native: bool, every: int) -> None:
    """A gradient moves the weights by 1/N of the rate; the N-th adds the momentum of their mean."""
    one = UpdateRule("sgd", lr=0.6, momentum=0.9, nesterov=True)
    late = replace(one, lr=0.6 / every, momentum_every=every)
    weights, expected = weights_at_first(torch.float64), weights_at_first(torch.float64)
    optimizer, moments = optimizer_of(late, native, torch.float64), init(late, NUMEL, torch.float64, empty)
    mean, whole = optimizer_of(one, False, torch.float64), init(one, NUMEL, torch.float64, empty)
    several = [*gradients(torch.float64), *gradients(torch.float64)[:2]]
    for step, gradient in enumerate(several, 1):
        before, kept = weights.clone(), gradient.clone()
        optimizer.step_(weights, weights, [Term(gradient, 1.0)], 1.0, moments, StepNumber(step), ())
        assert torch.equal(gradient, kept)
        if step % every:
            torch.testing.assert_close(weights, before - 0.6 / every * gradient, rtol=1e-12, atol=1e-14)
            continue
        terms = [Term(each, 1.0) for each in several[step - every : step]]
        mean.step_(expected, expected, terms, float(every), whole, StepNumber(step // every), ())
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


@both_ways
def test_adagrad_without_epsilon_leaves_what_has_no_gradient(native: bool) -> None:
    """DistBelief's rule has no ε: the first step is lr · g/|g|, and 0/0 counts as 0."""
    rule = UpdateRule("adagrad", lr=0.25, eps=0.0)
    optimizer = Optimizer(rule, [part_of(0, 4, 0)], torch.float32, native=native)
    out = empty(4, torch.float32)
    gradient = torch.tensor([0.0, 3.0, -1e-12, 0.0])
    moments = init(rule, 4, torch.float32, empty)
    optimizer.step_(torch.ones(4), out, [Term(gradient, 1.0)], 1.0, moments, StepNumber(1), ())
    assert out.tolist() == [1.0, 0.75, 1.25, 1.0]


@both_ways
def test_each_group_has_its_learning_rate(native: bool) -> None:
    rule = UpdateRule("sgd", momentum=0.5)
    optimizer = Optimizer(rule, [part_of(0, 2, 1), part_of(2, 3, 0)], torch.float32, native=native)
    weights, out = torch.zeros(3), empty(3, torch.float32)
    moments = init(rule, 3, torch.float32, empty)
    optimizer.step_(weights, out, [Term(torch.ones(3), 1.0)], 1.0, moments, StepNumber(1), (0.5, 0.25))
    assert out.tolist() == [-0.25, -0.25, -0.5]
    assert optimizer.lacks((0.5,)) == "no learning rate for parameter group 1: lrs are (0.5,)"
    assert optimizer.lacks((0.5, 0.25)) == ""
    assert Optimizer(replace(rule, lr=1.0), [part_of(0, 3, 1)], torch.float32, native=native).lacks(()) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@both_ways
def test_the_first_number_that_is_none_is_found(native: bool, bad: float, dtype: torch.dtype) -> None:
    values = torch.full((10_000,), torch.finfo(dtype).max, dtype=dtype)  # the sum is infinite, no element is
    assert first_unfinite(values, native) == -1
    for index in (9_999, 4_096, 4_095, 0):
        values[index] = bad
        assert first_unfinite(values, native) == index
    assert first_unfinite(values[:0], native) == -1


def test_there_is_no_kernel_for_halves() -> None:
    with pytest.raises(ValueError, match="native=False"):
        Optimizer(UpdateRule("sgd", lr=0.1), [], torch.bfloat16, native=True)
