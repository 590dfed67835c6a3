"""The staleness of gradients, and the gain of backup workers: the real rules, driven by simulated learners.

Figures in the names are of Gupta et al. 2015 (staleness) and of order statistics (backup workers).
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from random import Random
from statistics import fmean

import pytest

from polytempo.core.rule import Rule
from polytempo.server.rules.asynchronous import softsync
from polytempo.server.rules.synchronous_step import first, hardsync
from virtual.learners import Desk, simulate

LEARNERS = 30
SPLITS = (1, 15, 30)
MEANS = {1: 0.97, 15: 14.5, 30: 29.0}
"""The mean staleness under n-softsync."""


def staleness(n: int, duration_s: Callable[[int], float], pushes: int = 6_000) -> list[int]:
    """τ of each push under n-softsync with 30 learners, except for the first few, before any push."""
    run = simulate(
        Desk(softsync(n), members=tuple(range(LEARNERS))), duration_s, lambda run: len(run.staleness) >= pushes
    )
    return run.staleness[4 * LEARNERS :]


def jitter(seed: int, spread: float) -> Callable[[int], float]:
    random = Random(seed)
    return lambda worker: random.uniform(1 - spread, 1 + spread)


@pytest.mark.parametrize("n", SPLITS)
def test_mean_staleness_is_the_other_learners_over_c_whatever_the_times(n: int) -> None:
    law = (LEARNERS - 1) / (LEARNERS // n)
    assert law == pytest.approx(MEANS[n], abs=0.005)
    random = Random(n)
    for duration_s in (jitter(n, 0.05), jitter(n, 0.5), lambda worker: random.expovariate(1.0)):
        assert fmean(staleness(n, duration_s)) == pytest.approx(law, rel=0.03)


@pytest.mark.parametrize("n", SPLITS)
def test_no_gradient_is_staler_than_2n_if_times_vary_by_half(n: int) -> None:
    assert max(staleness(n, jitter(n, 0.5))) <= 2 * n


@pytest.mark.parametrize("n", SPLITS)
def test_the_bound_2n_is_of_even_clusters_not_of_the_protocol(n: int) -> None:
    """Exponential times make one gradient in twelve to one in eight staler."""
    random = Random(n)
    taus = staleness(n, lambda worker: random.expovariate(1.0))
    assert 0.075 < sum(tau > 2 * n for tau in taus) / len(taus) < 0.135


def test_hardsync_has_no_staleness() -> None:
    run = simulate(Desk(hardsync(), members=tuple(range(8))), jitter(0, 0.5), lambda run: run.desk.version >= 50)
    assert set(run.staleness) == {0}


# ------------------------------------------------------------------------------------------------- backup workers

WORKERS = 100


def five_times(seed: int) -> Callable[[int], float]:
    """One step in fifty takes five times as long."""
    random = Random(seed)
    return lambda worker: 5.0 if random.random() < 0.02 else 1.0


def lognormal(seed: int) -> Callable[[int], float]:
    random = Random(seed)
    return lambda worker: random.lognormvariate(0.0, 0.3)


def rate(n: int, duration_s: Callable[[int], float], updates: int, gives_up: bool = True) -> float:
    """Gradients that count, a second, if a step waits for n of 100 workers."""
    desk = Desk(first(n), members=tuple(range(WORKERS)))
    run = simulate(desk, duration_s, lambda run: run.desk.version >= updates, gives_up=gives_up)
    return n * updates / run.seconds


def test_waiting_for_96_of_100_gives_three_and_a_half_times_the_samples() -> None:
    """Workers give up gradients that would be late: each step is a fresh draw, so order statistics hold."""

    def law(n: int) -> float:
        late = sum(comb(WORKERS, k) * 0.02**k * 0.98 ** (WORKERS - k) for k in range(WORKERS - n + 1, WORKERS + 1))
        return n / (1 + 4 * late)

    gain = rate(96, five_times(0), 3000) / rate(100, five_times(1), 1000)
    assert law(96) / law(100) == pytest.approx(3.57, abs=0.005)
    assert gain == pytest.approx(3.57, rel=0.03)


def test_the_best_number_to_wait_for_is_inside() -> None:
    rates = {n: rate(n, five_times(2), 200) for n in (80, 90, 93, 96, 100)}
    assert max(rates, key=lambda n: rates[n]) == 93


def test_with_lognormal_times_96_of_100_gives_1_23_times_the_samples() -> None:
    assert rate(96, lognormal(3), 100) / rate(100, lognormal(4), 100) == pytest.approx(1.23, rel=0.05)


def test_workers_that_finish_what_will_be_late_move_the_best_number_to_80_to_85() -> None:
    """A worker that takes five times as long then misses five steps: one in eleven is behind at any time, not one in
    50."""
    updates = 150
    alone = rate(100, five_times(5), updates, gives_up=False)
    gains = {n: rate(n, five_times(5), updates, gives_up=False) / alone for n in (75, 80, 82, 85, 90, 96)}
    assert 80 <= max(gains, key=lambda n: gains[n]) <= 85
    assert gains[96] == pytest.approx(2, rel=0.1)
    assert gains[100 - 10] == pytest.approx(3.0, rel=0.1)
    assert gains[82] == pytest.approx(3.2, rel=0.1)


def test_without_backups_it_is_hardsync_action_by_action() -> None:
    def actions(rule: Rule) -> list[object]:
        desk = Desk(rule, members=tuple(range(8)))
        simulate(desk, jitter(6, 0.5), lambda run: run.desk.version >= 40)
        return list(desk.actions)

    assert actions(first(8)) == actions(first(20)) == actions(hardsync())
