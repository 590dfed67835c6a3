"""Optimizers of the native core: the twin's bits, torch's rules within an ulp, torch's losses over 200 steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from native import twin
from native.kernels import Buffer, assert_same_bits, choose, instruction_sets, library, update_
from native.twin import TwinHyper
from some_cases import examples

HYPERS = {
    "sgd": TwinHyper(lr=0.1),
    "sgd, decay": TwinHyper(lr=0.1, weight_decay=0.01),
    "momentum": TwinHyper(lr=0.05, momentum=0.9),
    "momentum, dampening, decay": TwinHyper(lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov, decay": TwinHyper(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "nesterov, uphill": TwinHyper(lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "adam": TwinHyper(rule="adam", lr=0.003),
    "adam, decay": TwinHyper(rule="adam", lr=0.003, weight_decay=0.01, beta1=0.8, beta2=0.99, eps=1e-6),
    "adam, uphill": TwinHyper(rule="adam", lr=0.003, maximize=True),
    "adamw": TwinHyper(rule="adamw", lr=0.003, weight_decay=0.01),
    "adamw, uphill": TwinHyper(rule="adamw", lr=0.003, weight_decay=0.1, maximize=True),
    "adagrad": TwinHyper(rule="adagrad", lr=0.05, eps=1e-10),
    "adagrad, both decays": TwinHyper(rule="adagrad", lr=0.05, eps=1e-10, lr_decay=0.01, weight_decay=0.01),
}


@pytest.fixture(autouse=True)
def same_instruction_set_afterwards() -> Iterator[None]:
    before = library().pt_isa().decode()
    yield
    choose(before)


def has_m(hyper: TwinHyper) -> bool:
    return hyper.rule in ("adam", "adamw") or (hyper.rule == "sgd" and hyper.momentum != 0)


def has_v(hyper: TwinHyper) -> bool:
    return hyper.rule != "sgd"


def state_of(hyper: TwinHyper, dtype: torch.dtype, count: int, generator: torch.Generator) -> list[Tensor | None]:
    """p, m, v as they may be in the middle of a training, a few components of p still 0."""
    p, m, v = (torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    p = p * (torch.rand(count, generator=generator) > 0.1).to(dtype)
    return [p, m if has_m(hyper) else None, v.square() if has_v(hyper) else None]


def applied(
    hyper: TwinHyper, gradients: Sequence[Tensor | None], weights: Tensor, state: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """p, m, v after one native step, in place."""
    buffers = [None if part is None else Buffer(part, 0) for part in state]
    given_gradients = [None if gradient is None else Buffer(gradient, 0) for gradient in gradients]
    assert update_(hyper, given_gradients, weights, buffers, buffers) == 0
    return [None if buffer is None else buffer.values() for buffer in buffers]


@settings(max_examples=examples(200))
@pytest.mark.parametrize("isa", instruction_sets())
@given(
    name=st.sampled_from(sorted(HYPERS)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    present=st.lists(st.booleans(), max_size=7),
    count=st.sampled_from([0, 1, 7, 16, 511, 513, 1500]),
    offset_bytes=st.integers(0, 9),
    in_place=st.booleans(),
    step=st.integers(1, 10**6),
    first=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_twin_to_the_bit(
    isa: str,
    name: str,
    dtype: torch.dtype,
    present: list[bool],
    count: int,
    offset_bytes: int,
    in_place: bool,
    step: int,
    first: bool,
    seed: int,
) -> None:
    assert choose(isa)
    hyper = dataclasses.replace(HYPERS[name], step=step, first=first)
    generator = torch.Generator().manual_seed(seed)
    state = state_of(hyper, dtype, count, generator)
    gradients = [
        torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) if here else None for here in present
    ]
    weights = torch.rand(len(present), generator=generator, dtype=dtype)

    inputs = [None if part is None else Buffer(part, offset_bytes) for part in state]
    outs = inputs if in_place else [None if part is None else Buffer(torch.zeros_like(part), 0) for part in state]
    buffers = [None if gradient is None else Buffer(gradient, offset_bytes) for gradient in gradients]
    assert update_(hyper, buffers, weights, inputs, outs) == 0

    p, m, v = state
    assert p is not None
    for out, expected in zip(outs, twin.update(hyper, gradients, weights, p, m, v), strict=True):
        assert (out is None) == (expected is None)
        if out is not None and expected is not None:
            assert_same_bits(out.values(), expected)


def torch_optimizer(hyper: TwinHyper, parameter: Tensor) -> Optimizer:
    own, lr, decay, uphill = [parameter], hyper.lr, hyper.weight_decay, hyper.maximize
    betas = (hyper.beta1, hyper.beta2)
    match hyper.rule:
        case "sgd":
            return SGD(own, lr, hyper.momentum, hyper.dampening, decay, hyper.nesterov, maximize=uphill)
        case "adam":
            return Adam(own, lr, betas, hyper.eps, decay, maximize=uphill)
        case "adamw":
            return AdamW(own, lr, betas, hyper.eps, decay, maximize=uphill)
        case _:
            return Adagrad(own, lr, hyper.lr_decay, decay, eps=hyper.eps, maximize=uphill)


def torch_step(hyper: TwinHyper, gradient: Tensor, state: Sequence[Tensor | None]) -> list[Tensor | None]:
    """p, m, v after one step of torch's own optimizer from there, all in f64."""
    p, m, v = (None if part is None else part.double() for part in state)
    assert p is not None
    optimizer = torch_optimizer(hyper, p)
    own = optimizer.state[p]
    if hyper.rule == "sgd":
        own["momentum_buffer"] = None if hyper.first else m
    else:
        own |= {"step": torch.tensor(float(hyper.step - 1)), "exp_avg": m, "exp_avg_sq": v, "sum": v}
    p.grad = gradient.double()
    optimizer.step()
    return [p, own.get("momentum_buffer") if hyper.rule == "sgd" else m, v]


def ulps(found: Tensor, expected: Tensor) -> float:
    """The largest distance from the f64 values `expected`, in units of the last place of the f32 next to each."""
    nearest = expected.float()
    unit = (torch.nextafter(nearest.abs(), torch.tensor(torch.inf)).double() - nearest.abs().double()).clamp(
        min=2**-149
    )
    return float(((found.double() - expected).abs() / unit).max())


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("name", HYPERS)
@pytest.mark.parametrize(("step", "first"), [(1, True), (2, False), (10, False), (5000, False)])
def test_a_step_is_within_one_ulp_of_torch_in_f64(isa: str, name: str, step: int, first: bool) -> None:
    """An ulp of the result itself, even where it is small against its terms."""
    assert choose(isa)
    hyper = dataclasses.replace(HYPERS[name], step=step, first=first)
    generator = torch.Generator().manual_seed(step)
    state = state_of(hyper, torch.float32, 5000, generator)
    gradients = [torch.randn(5000, generator=generator) for _ in range(4)]
    weights = torch.tensor([0.25, 0.3, 0.1, 0.35])
    mean = sum((weight * gradient.double() for weight, gradient in zip(weights.double(), gradients, strict=True)), 0)
    assert isinstance(mean, Tensor)
    for found, expected in zip(applied(hyper, gradients, weights, state), torch_step(hyper, mean, state), strict=True):
        if found is not None and expected is not None:
            assert ulps(found, expected) <= 1


@pytest.mark.parametrize("name", HYPERS)
def test_losses_over_200_steps_are_those_of_torch(name: str) -> None:
    """A small network and two halves of its batch; torch's optimizer in f32 beside ours. Uphill: on minus the loss."""
    hyper = HYPERS[name]
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 8, generator=generator), torch.randn(64, generator=generator)
    theirs = torch.randn(8 * 16 + 16, generator=generator) / 4
    optimizer = torch_optimizer(hyper, theirs)
    state: list[Tensor | None] = [
        theirs.clone(),
        torch.zeros_like(theirs) if has_m(hyper) else None,
        torch.zeros_like(theirs) if has_v(hyper) else None,
    ]
    losses = []
    for step in range(1, 201):
        p = state[0]
        assert p is not None
        our_loss, their_loss = loss(p, x, y), loss(theirs, x, y)
        assert abs(our_loss - their_loss) <= 1e-5, f"step {step}"
        losses.append(our_loss)
        halves = [gradient(p, x[half], y[half], hyper) for half in (slice(0, 32), slice(32, 64))]
        now = dataclasses.replace(hyper, step=step, first=step == 1)
        state = applied(now, halves, torch.tensor([0.5, 0.5]), state)
        theirs.grad = gradient(theirs, x, y, hyper)
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


def network(p: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ p[:128].view(8, 16)) @ p[128:]


def loss(p: Tensor, x: Tensor, y: Tensor) -> float:
    return float((network(p, x) - y).square().mean())


def gradient(p: Tensor, x: Tensor, y: Tensor, hyper: TwinHyper) -> Tensor:
    leaf = p.detach().clone().requires_grad_()
    value = (network(leaf, x) - y).square().mean()
    (result,) = torch.autograd.grad(-value if hyper.maximize else value, leaf)
    return result


@pytest.mark.parametrize(
    ("dtype", "hyper"), [(torch.float16, TwinHyper(lr=0.1)), (torch.int32, TwinHyper(lr=0.1))], ids=["f16", "i32"]
)
def test_other_types_are_refused_and_nothing_is_written(dtype: torch.dtype, hyper: TwinHyper) -> None:
    p = Buffer(torch.ones(3, dtype=dtype), 0)
    assert update_(hyper, [p], torch.ones(1, dtype=dtype), [p, None, None], [p, None, None]) == 1
    assert_same_bits(p.values(), torch.ones(3, dtype=dtype))
