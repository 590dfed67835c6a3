"""The optimizer keeps its meaning: rates, decay and momentum act as without a strategy.

Every strategy of the catalogue without a parameter server obeys this, and so do strategies with helping workers;
deviations in a docstring are tested instead, and impossible ones are refused when they are built.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laws.catalogue import HELPED, ROWS, Row, label
from laws.definitions import OuterStep, Streams, adam_steps, nesterov_steps, schedule_free_steps, streaming_arguments
from laws.optimizers import (
    CLUSTER,
    LR,
    NAMES,
    OPTIMIZED,
    PLAIN,
    SLOPE,
    STEPS,
    WITH_BOTH,
    Optimized,
    Weights,
    end_of,
    ended,
    stepped,
)
from polytempo import strategies
from polytempo.cluster import slow_host
from polytempo.core import Strategy
from polytempo.training.step.replica import Replica
from some_cases import some_of

# --------------------------------------------------------------------------- docstrings' deviations from plain torch


def delayed(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """Nothing at all happens in the first d steps, but the schedule goes on."""
    match = re.search(r"delay=(\d+)", label(row))
    assert match is not None
    delay = int(match[1])
    return end_of(optimized, [None] * delay + [PLAIN] * (STEPS - delay))


def acco(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """Every second step is undone before the next one, but the schedule goes on; the last one stays."""
    weights = Weights()
    optimizer = optimized.make(weights.parameters())
    schedule = optimized.schedule(optimizer)
    for step in range(STEPS):
        if step % 2 == 0 or step == STEPS - 1:
            optimizer.step()
        schedule.step()
        weights.clock.grad, weights.still.grad = (torch.tensor([slope], dtype=torch.float64) for slope in PLAIN)
    return weights.ends()


OUTER: dict[str, tuple[int, Callable[[], OuterStep]]] = {
    "outer_adam": (3, adam_steps),
    "outer_schedule_free": (2, schedule_free_steps),
}
"""The period and the outer steps of rows, by their `alone`."""


def diloco(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """Every few steps the outer optimizer moves the anchor, and the inner one keeps its state."""
    period, steps = OUTER.get(str(row.alone), (5, lambda: nesterov_steps(0.7, 0.5)))
    anchor, outer_step = torch.ones(2, dtype=torch.float64), steps()
    for step, weights in enumerate(stepped(optimized, [PLAIN] * STEPS), start=1):
        if step % period == 0:
            anchor = anchor - outer_step(anchor - weights.ends(), step // period)
            nn.utils.vector_to_parameters(anchor.clone(), weights.parameters())
    return weights.ends()


def slowmo(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """Every `period` steps all move by v ← 0.5 v + Δ; the inner optimizer keeps its state."""
    match = re.search(r"period=(\d+)", label(row))
    assert match is not None
    anchor, velocity = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for step, weights in enumerate(stepped(optimized, [PLAIN] * STEPS), start=1):
        if step % int(match[1]) == 0:
            velocity = 0.5 * velocity + anchor - weights.ends()
            anchor = anchor - velocity
            nn.utils.vector_to_parameters(anchor.clone(), weights.parameters())
    return weights.ends()


def co2(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """Every three steps all return to the anchor, which has moved by half of v ← 0.2 v + the movement before."""
    anchor, velocity = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    before = None
    for step, weights in enumerate(stepped(optimized, [PLAIN] * STEPS), start=1):
        if step % 3 == 0:
            now = anchor - weights.ends()
            if before is not None:
                velocity = 0.2 * velocity + before
                anchor = anchor - 0.5 * velocity
            before = now
            nn.utils.vector_to_parameters(anchor.clone(), weights.parameters())
    return weights.ends()


def streaming_diloco(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """Fragments meet at their own steps; the inner optimizer keeps its state."""
    if "fragments=1" in label(row):
        return diloco(row, optimized, workers)
    streams = Streams(Weights().parameters(), *streaming_arguments(label(row)))
    for step, weights in enumerate(stepped(optimized, [PLAIN] * STEPS), start=1):
        streams.parameters = list(weights.parameters())
        streams.after(step)
    return weights.ends()


def hogwild(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """N workers make N updates of the one copy in a step, each by an optimizer of its own."""
    shared = Weights()
    optimizers = [optimized.make(shared.parameters()) for _ in range(workers)]
    schedules = [optimized.schedule(optimizer) for optimizer in optimizers]
    shared.clock.grad, shared.still.grad = (torch.tensor([slope], dtype=torch.float64) for slope in PLAIN)
    for _ in range(STEPS):
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    return shared.ends()


def sign_sgd(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """A hundredth of the majority's sign. One bit has no word for 0: rank i says + where i + step is odd."""
    if workers == 1 and "momentum=0.9" in label(row):
        return end_of(optimized, [(PLAIN[0] * (1 - 0.9**step), 0.0) for step in range(1, STEPS + 1)])
    if workers == 1 or "feedback=True" in label(row):
        return end_of(optimized, [PLAIN] * STEPS)
    votes = [sum(1 if (rank + step) % 2 else -1 for rank in range(workers)) for step in range(1, STEPS + 1)]
    return end_of(optimized, [(0.01, 0.01 * ((vote > 0) - (vote < 0))) for vote in votes])


def robust_sgd(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """Equal gradients are their merge; centered_clip(0.5, 2) comes up to them by 1 a step."""
    if "momentum=0.9" in label(row):
        return end_of(optimized, [(SLOPE * (1 - 0.9**step), 0.0) for step in range(1, STEPS + 1)])
    if workers > 1 and "tau=0.5" in label(row):
        return end_of(optimized, [(min(SLOPE, float(step)), 0.0) for step in range(1, STEPS + 1)])
    return plain(row, optimized, workers)


def plain(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """Each step is one of plain torch."""
    return end_of(optimized, [PLAIN] * STEPS)


def demo(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """A hundredth of the sign of the mean."""
    return end_of(optimized, [(0.01, 0.0)] * STEPS)


def distributed_lion(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """A hundredth of the majority's sign; one worker's sign has a 0."""
    return demo(row, optimized, workers) if workers == 1 else sign_sgd(row, optimized, workers)


def one_bit_adam(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """A hundredth of Adam's step of a constant gradient, and none without a gradient."""
    return end_of(optimized, [(0.01 * SLOPE / (SLOPE + 1e-8), 0.0)] * STEPS)


def quasi_global_momentum(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """All go on by 0.9 of the average of the movements so far after each step."""
    before, velocity = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for weights in stepped(optimized, [PLAIN] * STEPS):
        after = weights.ends() - 0.9 * velocity
        velocity = 0.9 * velocity + 0.1 * (before - after)
        before = after
        nn.utils.vector_to_parameters(after.clone(), weights.parameters())
    return before


def bounded(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """Every batch of the N workers is one step, at one Nth of the learning rate."""
    weights = Weights()
    optimizer = optimized.make(weights.parameters())
    weights.clock.grad, weights.still.grad = (torch.tensor([slope], dtype=torch.float64) for slope in PLAIN)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR / (1 + step if optimized.falls else 1) / workers
        for _ in range(workers):
            optimizer.step()
    return weights.ends()


INSTEAD: dict[str, Callable[[Row, Optimized, int], Tensor]] = {
    "acco": acco,
    "co2": co2,
    "delayed_sgd": delayed,
    "demo": demo,
    "diloco": diloco,
    "distributed_lion": distributed_lion,
    "hogwild": hogwild,
    "islands": lambda row, *args: (diloco if "diloco" in label(row) else plain)(row, *args),
    "noloco": slowmo,
    "one_bit_adam": one_bit_adam,
    "quasi_global_momentum": quasi_global_momentum,
    "robust_sgd": robust_sgd,
    "sign_sgd": sign_sgd,
    "slowmo": slowmo,
    "streaming_diloco": streaming_diloco,
    "sparta": lambda row, *args: (diloco if "diloco" in label(row) else plain)(row, *args),
    "zero_one_adam": one_bit_adam,
}


def expected(row: Row, optimized: Optimized, workers: int) -> Tensor:
    """The ends of (clock, still)."""
    if "bound=2" in label(row):
        return bounded(row, optimized, workers)
    if row.name in INSTEAD:
        return INSTEAD[row.name](row, optimized, workers)
    return plain(row, optimized, workers)


def tolerance(row: Row, workers: int) -> float:
    """The tolerance of |found - expected|: codes round, and with feedback the last rounding is still residual."""
    if workers > 1 and "bf16" in label(row):
        return 2e-2
    if workers > 1 and row.name == "hogwild":
        return 2e-2  # the interleaving decides which decayed weights a rank reads
    return 1e-6 if workers > 1 and row.name in ("int8_sgd", "one_bit_adam", "threshold_sgd", "zero_one_adam") else 1e-11


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("row", [*ROWS, *HELPED], ids=label)
def test_rates_decay_and_momentum_are_those_of_the_docstring(row: Row, workers: int) -> None:
    for optimized in WITH_BOTH:
        ends, _ = ended(row.make(), workers, optimized)
        target = expected(row, optimized, workers)
        assert len(ends) == workers
        for end in ends:
            assert (end - target).abs().max() < tolerance(row, workers), (
                f"{optimized}: {end} is not {target}; where the docstring says so, say it in INSTEAD"
            )


@pytest.mark.parametrize("optimized", some_of([each for each in OPTIMIZED if each.decays], 1), ids=str)
def test_help_with_a_bound_is_no_step_of_its_own(optimized: Optimized) -> None:
    """One of three workers is slow, and the others do a part of its batches."""
    row = next(row for row in HELPED if "bound=2" in label(row))
    slow = replace(CLUSTER, flops_per_s=1000.0, stragglers=slow_host(2, 3.0), workers_per_host=1)
    ends, result = ended(row.make(), 3, optimized, batch_size=80, cluster=slow)
    assert result.server is not None
    assert sum(worker["slices_helped"] for worker in result.server["workers"]) > STEPS
    assert result.server["updates"] == 3 * STEPS
    target = bounded(row, optimized, 3)
    assert all((end - target).abs().max() < 1e-11 for end in ends)


@pytest.mark.parametrize("name", NAMES)
def test_the_clock_tells_its_models_apart(name: str) -> None:
    """The sum of rates: SGD moves the clock by SLOPE · LR · Σ 1/(1 + t); and each optimizer elsewhere than another."""
    ends = {str(each): end_of(each, [PLAIN] * STEPS) for each in OPTIMIZED}
    if name == "sgd":
        falling = ends["sgd, schedule"][0]
        assert falling == pytest.approx(1 - SLOPE * LR * sum(1 / (1 + step) for step in range(STEPS)))
        assert ends["sgd, weight decay"][1] == pytest.approx((1 - LR * 0.1) ** STEPS)
    for kind in ("weight decay", "schedule"):
        mine = ends.pop(f"{name}, {kind}")
        assert all((mine - other).abs().max() > 1e-2 for other in ends.values())


# ---------------------------------------------------------------------------------------------------------- refusals

Make = Callable[[list[nn.Parameter]], Optimizer]
MOMENTUM: Make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)  # noqa: E731
DGC = r"dgc\(.*\) applies momentum 0.9 itself, and {} would apply its {} {} once more; use dgc\(momentum=0\), or an opt"
ADASUM = (
    r"adasum\(of='gradients'\) needs an optimizer with a step linear in the gradient, which is SGD, and {} divides "
    r"by the gradient's size; use adasum\(of='updates'\), or adasum\(\)"
)
REFUSED: list[tuple[Strategy, Make, str]] = [
    (strategies.dgc(), MOMENTUM, DGC.format("SGD", "momentum", "0.5")),
    (strategies.dgc(), lambda p: torch.optim.RMSprop(p, momentum=0.5), DGC.format("RMSprop", "momentum", "0.5")),
    (strategies.dgc(), torch.optim.Adam, DGC.format("Adam", "beta1", "0.9")),
    (strategies.dgc(), torch.optim.AdamW, DGC.format("AdamW", "beta1", "0.9")),
    (strategies.dgc(), torch.optim.NAdam, DGC.format("NAdam", "beta1", "0.9")),
    (strategies.dgc(), torch.optim.RAdam, DGC.format("RAdam", "beta1", "0.9")),
    (strategies.dgc(), torch.optim.Adamax, DGC.format("Adamax", "beta1", "0.9")),
    (
        strategies.parameter_averaging(),
        torch.optim.LBFGS,
        r"LBFGS .* no mean; use parameter_averaging\(optimizer_state=F",
    ),
    (strategies.adasum(of="gradients"), torch.optim.Adam, ADASUM.format("Adam")),
    (strategies.adasum(of="gradients"), torch.optim.Adagrad, ADASUM.format("Adagrad")),
    (strategies.adasum(of="gradients"), torch.optim.RMSprop, ADASUM.format("RMSprop")),
]
TAKEN: list[tuple[Strategy, Make]] = [
    (strategies.dgc(), lambda p: torch.optim.SGD(p, lr=0.1)),
    (strategies.dgc(), torch.optim.RMSprop),
    (strategies.dgc(), torch.optim.Adagrad),
    (strategies.dgc(), lambda p: torch.optim.Adam(p, betas=(0.0, 0.999))),
    (strategies.dgc(momentum=0.0), torch.optim.Adam),
    (strategies.adasum(of="gradients"), MOMENTUM),
    (strategies.adasum(of="updates"), torch.optim.Adam),
    (strategies.adasum(), torch.optim.RMSprop),
]


@pytest.mark.parametrize(("strategy", "make", "remedy"), REFUSED)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_does_not_go_together_is_refused_when_it_is_built(
    strategy: Strategy, make: Make, remedy: str, ranks: int
) -> None:
    weights = Weights()
    with pytest.raises(ValueError, match=remedy):
        Replica(weights, make(list(weights.parameters())), strategy, ranks)


@pytest.mark.parametrize(("strategy", "make"), TAKEN)
def test_what_goes_together_is_taken(strategy: Strategy, make: Make) -> None:
    weights = Weights()
    Replica(weights, make(list(weights.parameters())), strategy, 3)


def test_adasum_is_of_gradients_under_sgd_and_of_updates_else() -> None:
    weights = Weights()
    names = [
        str(Replica(weights, make(list(weights.parameters())), strategies.adasum(), 3).strategy)
        for make in (MOMENTUM, torch.optim.AdamW)
    ]
    assert names == ["adasum(of=None)", "adasum(of='updates')"]
    with pytest.raises(ValueError, match='of must be "gradients", "updates" or None, got \'parameters\''):
        strategies.adasum(of="parameters")  # type: ignore[arg-type]
