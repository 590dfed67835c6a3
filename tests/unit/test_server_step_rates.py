"""Gradients with learning rates of their own in one update: its rate is their mean, and each counts by its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from polytempo.core.rule import Add, Arrival, Rule, Service, Update, UpdateRule
from polytempo.native.library import available
from polytempo.server.layout import Parameter, shard_map
from polytempo.server.message import COORDINATOR, Lend, Lent, Members, Pull, Pulled, Push, Reshape, Rows
from polytempo.server.rules.asynchronous import on_arrival, softsync
from polytempo.server.rules.staleness import inverse
from polytempo.server.shard.shard import Shard
from polytempo.server.step_rates import Multiples, StepRates

both_ways = pytest.mark.parametrize(
    "native",
    [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="no native core here"))],
    ids=["torch ops", "kernel"],
)
MODEL = (Parameter("w", 6), Parameter("b", 4, group=1))
NUMEL = 10
RULES = {
    "sgd": UpdateRule("sgd", weight_decay=0.1),
    "momentum": UpdateRule("sgd", momentum=0.9, weight_decay=0.1),
    "nesterov": UpdateRule("sgd", momentum=0.9, nesterov=True),
    "adagrad": UpdateRule("adagrad", weight_decay=0.1, eps=1e-10),
    "adam": UpdateRule("adam", weight_decay=0.1),
    "adamw": UpdateRule("adamw", weight_decay=0.1),
}


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("gradients", "multiples", "rates", "divisor"),
    [
        ([(1, (0.5,))], [Multiples(1)], (0.5,), 2),
        ([(1, (0.5,)), (1, (0.5,))], [Multiples(1), Multiples(1)], (0.5,), 2),
        ([(3, (0.5,)), (1, (0.5,))], [Multiples(3), Multiples(1)], (0.5,), 2),  # weights of a mean are not rates
        ([(1, (0.5,)), (1, (0.25,))], [Multiples(1), Multiples(0.5)], (0.375,), 1.5),
        ([(1, (0.25,)), (1, (0.5,))], [Multiples(1), Multiples(1.0, 0.5)], (0.375,), 1.5),
        ([(3, (0.25,)), (1, (0.5,))], [Multiples(3), Multiples(1.0, 0.5)], (0.3125,), 1.25),
        ([(1, (0.0,)), (1, (0.0,))], [Multiples(1), Multiples(1)], (0.0,), 2),
        ([(1, (0.0,)), (1, (0.5,))], [Multiples(1), Multiples(1.0, 0.0)], (0.25,), 1),
        ([(1, (0.5,)), (1, (0.0,))], [Multiples(1), Multiples(0.0)], (0.25,), 1),
        ([(0, (4.0,)), (2, (0.5,))], [Multiples(0), Multiples(2)], (0.5,), 2),  # a weight of 0 has no effect
        ([(1, (0.5, 1.0)), (1, (0.25, 0.5))], [Multiples(1), Multiples(0.5)], (0.375, 0.75), 1.5),
        (
            [(1, (0.5, 1.0)), (1, (0.25, 2.0))],
            [Multiples(1), Multiples((0.5, 1.0), (1.0, 0.5))],
            (0.375, 1.5),
            1.5,
        ),
    ],
)
def test_a_table_of_steps(
    gradients: Sequence[tuple[float, tuple[float, ...]]],
    multiples: list[Multiples],
    rates: tuple[float, ...],
    divisor: float,
) -> None:
    """(weight, rates) of each gradient; divisor 2."""
    found, state = [], StepRates()
    for weight, own in gradients:
        state, one = state.with_one(weight, own)
        found.append(one)
    assert found == multiples
    assert state.step(2) == (rates, divisor)


def test_equal_rates_round_nothing() -> None:
    state = StepRates()
    for _ in range(7):
        state, multiples = state.with_one(1 / 3, (0.1, 0.7))
        assert multiples == Multiples(1 / 3)
    assert state.step(7 / 3) == ((0.1, 0.7), 7 / 3)


def test_rates_that_cancel_leave_the_weights() -> None:
    state, _ = StepRates().with_one(1.0, (0.5,))
    state, _ = state.with_one(1.0, (-0.5,))
    assert state.step(2.0) == ((0.0,), 2.0)


# -------------------------------------------------------------------------------------------------------------- shards


def shard(rule: Rule, optimizer: UpdateRule, native: bool | None = None, **more: object) -> Shard:
    spans = more.get("spans", shard_map(MODEL, 1)[0])
    weights = torch.linspace(-1, 1, NUMEL, dtype=torch.float64)
    whole = torch.cat([weights[begin:end] for begin, end in spans]) if spans else weights[:0]  # type: ignore[attr-defined]
    found = Shard(0, MODEL, spans, whole, Service(rule, optimizer), native=native)  # type: ignore[arg-type]
    found.apply(Members(COORDINATOR, 1, 1, tuple((worker, 1) for worker in range(3))))
    return found


def gradients(count: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.randn(NUMEL, generator=random, dtype=torch.float64) for _ in range(count)]


def push(sequence: int, gradient: Tensor, basis: int, lrs: tuple[float, ...], worker: int = 0) -> Push:
    return Push(worker, 1, sequence, sequence, basis, 1, lrs, (), gradient)


def alone(rule: UpdateRule, steps: Sequence[tuple[Tensor, tuple[float, float]]]) -> Tensor:
    """Plain torch: a gradient and the groups' rates in each step."""
    parts = torch.linspace(-1, 1, NUMEL, dtype=torch.float64).split([6, 4])
    weights = [torch.nn.Parameter(part.clone()) for part in parts]
    groups = [{"params": [weight]} for weight in weights]
    kinds = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    own: dict[str, object] = {"lr": 1.0, "weight_decay": rule.weight_decay, "foreach": False}
    if rule.kind == "sgd":
        own |= {"momentum": rule.momentum, "nesterov": rule.nesterov}
    optimizer = kinds[rule.kind](groups, **own)
    for gradient, rates in steps:
        for weight, group, part, rate in zip(
            weights, optimizer.param_groups, gradient.split([6, 4]), rates, strict=True
        ):
            weight.grad, group["lr"] = part.clone(), rate
        optimizer.step()
    return torch.cat([weight.detach() for weight in weights])


@both_ways
@pytest.mark.parametrize("optimizer", RULES.values(), ids=list(RULES))
def test_staleness_divides_the_rate_of_every_optimizer(optimizer: UpdateRule, native: bool) -> None:
    """Each push is of version 0, so they are 0, 1, 2, … updates old: the rates are η/1, η/1, η/2, η/3, …"""
    found = shard(on_arrival(inverse), optimizer, native)
    given = gradients(8)
    for number, gradient in enumerate(given):
        found.apply(push(number + 1, gradient, 0, (0.1, 0.02)))
    steps = [(gradient, (0.1 / max(1, tau), 0.02 / max(1, tau))) for tau, gradient in enumerate(given)]
    torch.testing.assert_close(found.weights, alone(optimizer, steps), rtol=1e-12, atol=1e-13)


@both_ways
@pytest.mark.parametrize("optimizer", RULES.values(), ids=list(RULES))
def test_an_update_of_several_has_their_mean_rate_and_each_counts_by_its_own(
    optimizer: UpdateRule, native: bool
) -> None:
    """Pairs with rates that differ by staleness and by schedule, and not alike in the two parameter groups."""
    found = shard(softsync(1, inverse, workers=2), optimizer, native)
    lrs = [(0.1, 0.02), (0.05, 0.03), (0.2, 0.02), (0.0, 0.01), (0.0, 0.0), (0.3, 0.0), (0.1, 0.01), (0.1, 0.01)]
    bases = [0, 0, 0, 1, 0, 0, 3, 3]
    given, steps = gradients(8), []
    for number, (gradient, rates, basis) in enumerate(zip(given, lrs, bases, strict=True)):
        found.apply(push(number + 1, gradient, basis, rates))
    for pair in range(4):
        rows = []
        for one in (2 * pair, 2 * pair + 1):
            scale = 1 / max(1, pair - bases[one])
            rows.append((given[one].split([6, 4]), [scale * rate for rate in lrs[one]]))
        means = [(rows[0][1][group] + rows[1][1][group]) / 2 for group in (0, 1)]
        parts = [
            sum(row[1][group] * row[0][group] for row in rows) / (2 * means[group])
            if means[group]
            else (rows[0][0][group] + rows[1][0][group]) / 2
            for group in (0, 1)
        ]
        steps.append((torch.cat(parts), (means[0], means[1])))
    torch.testing.assert_close(found.weights, alone(optimizer, steps), rtol=1e-12, atol=1e-13)


@both_ways
def test_a_sum_of_several_rates_survives_a_snapshot(native: bool) -> None:
    rule, optimizer = softsync(1, inverse, workers=3), RULES["adamw"]
    through, saved = shard(rule, optimizer, native), shard(rule, optimizer, native)
    pushes = [
        push(number + 1, gradient, 0, rates)
        for number, (gradient, rates) in enumerate(
            zip(gradients(6), [(0.1, 0.1), (0.2, 0.1), (0.1, 0.3), (0.4, 0.4), (0.1, 0.5), (0.9, 0.1)], strict=True)
        )
    ]
    for one in pushes:
        through.apply(one)
        saved.apply(one)
        fresh = shard(rule, optimizer, native)
        fresh.load(*saved.dump())
        saved = fresh
    assert torch.equal(saved.weights, through.weights)
    assert saved.version == through.version == 2


def test_sums_that_meet_in_one_shard_are_measured_in_one_rate() -> None:
    """Shard 1 had heard of its gradient later, when it was twice as stale, so its sum is of half the rate."""
    whole, first, second = (tuple(spans) for spans in (shard_map(MODEL, 1)[0], *shard_map(MODEL, 2)))
    rule, optimizer = softsync(1, workers=3), UpdateRule("sgd")
    one, other = shard(rule, optimizer, spans=first), shard(rule, optimizer, spans=second)
    gradient, later = gradients(2)
    for held, spans, rates in ((one, first, (0.2, 0.4)), (other, second, (0.1, 0.8))):
        mine = torch.cat([gradient[begin:end] for begin, end in spans])
        held.apply(push(1, mine, 0, rates))
        held.apply(push(1, mine, 0, rates, worker=1))
    (lent,) = other.apply(Lend(COORDINATOR, 1, 2, second))
    assert isinstance(lent, Lent)
    one.apply(Reshape(COORDINATOR, 1, 2, whole, (lent,)))
    one.apply(push(2, later, 0, (0.4, 0.4)))
    rate = torch.tensor([0.2] * 6 + [0.4] * 4, dtype=torch.float64)
    begin = first[0].end
    rate[begin:6], rate[max(begin, 6) :] = 0.1, 0.8
    begun = torch.linspace(-1, 1, NUMEL, dtype=torch.float64)
    expected = begun - (2 * rate * gradient + 0.4 * later) / 3
    torch.testing.assert_close(one.weights, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_rows_of_tables_count_by_their_rates_too(kind: str) -> None:
    """A table of 3 rows in a group of its own beside 2 dense elements, in pairs; rows that only one has, too."""
    model = (Parameter("dense", 2), Parameter("table", 6, group=1, row_width=2))
    rule = UpdateRule("sgd") if kind == "sgd" else UpdateRule("adagrad", eps=1e-10)
    held = Shard(0, model, shard_map(model, 1)[0], torch.zeros(8), Service(softsync(1, inverse, workers=2), rule))
    held.apply(Members(COORDINATOR, 1, 1, ((0, 1), (1, 1))))
    parts = [([0, 1], 1.0, (0.1, 0.2)), ([1, 2], 3.0, (0.1, 0.6))]
    for number, (rows, value, lrs) in enumerate(parts, start=1):
        touched = Rows(0, torch.tensor(rows), torch.full((2, 2), value))
        held.apply(Push(0, 1, number, number, 0, 1, lrs, (), torch.full((2,), value), (touched,)))
    *_, pulled = held.apply(Pull(0, 1, 2, 2, -1))
    assert isinstance(pulled, Pulled)
    table = pulled.rows[0].values[:, 0]
    rate = (0.2 + 0.6) / 2
    means = torch.tensor([0.2 * 1, 0.2 * 1 + 0.6 * 3, 0.6 * 3]) / (2 * rate)
    expected = -rate * (means if kind == "sgd" else means.sign())
    torch.testing.assert_close(table, expected, rtol=1e-6, atol=1e-6)
    dense = 0.1 * (2.0 if kind == "sgd" else 1.0)
    torch.testing.assert_close(held.weights, torch.full((2,), -dense), rtol=1e-6, atol=1e-6)


def test_half_precision_bears_rates_that_rise_by_far() -> None:
    """A warm-up from nearly nothing: measured in the first rate the sum would be 60000 times too large."""
    model = (Parameter("w", 2),)
    weights = torch.zeros(2, dtype=torch.float16)
    held = Shard(0, model, shard_map(model, 1)[0], weights, Service(softsync(1, workers=2), UpdateRule("sgd")))
    held.apply(Members(COORDINATOR, 1, 1, ((0, 1), (1, 1))))
    for number, rate in enumerate((1e-7, 0.5), start=1):
        held.apply(Push(0, 1, number, number, 0, 1, (rate,), (), torch.full((2,), 4.0, dtype=torch.float16)))
    assert held.weights.tolist() == [-1.0, -1.0]


def test_what_a_rule_weighs_and_what_it_scales_are_two_numbers() -> None:
    def receive(state: int, arrival: Arrival, situation: object) -> tuple[int, list[object]]:
        return state, [Add(arrival.worker, weight=4.0, rate=0.5), Update(4.0)] if arrival.kind == "push" else []

    held = shard(Rule("both()", int, receive), UpdateRule("adamw"))  # type: ignore[arg-type]
    (gradient,) = gradients(1)
    held.apply(push(1, gradient, 0, (0.1, 0.1)))
    expected = alone(UpdateRule("adamw"), [(gradient, (0.05, 0.05))])
    torch.testing.assert_close(held.weights, expected, rtol=1e-12, atol=1e-13)
