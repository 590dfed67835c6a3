"""Clusters: their numbers, and how the time of one computation varies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import fmean, median

import pytest

from helpers import CLUSTER
from polytempo import collectives, strategies
from polytempo.cluster import (
    Cluster,
    Crash,
    Link,
    Pause,
    Stragglers,
    constant,
    ethernet,
    exponential,
    infiniband,
    internet,
    lognormal,
    occasional,
    one_host,
    slow_host,
    uniform,
)
from polytempo.compression import bf16
from polytempo.core import Port, Strategy
from polytempo.jobs import find
from polytempo.runs.simulated.simulate import simulate
from polytempo.worlds import VirtualWorld


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (ethernet(), (Link(50e-6, 1.25e9), 1, 10e9)),
        (ethernet(gbit_per_s=1, latency_us=100, workers_per_host=4, gflops=50), (Link(100e-6, 125e6), 4, 50e9)),
        (infiniband(), (Link(2e-6, 25e9), 8, 100e12)),
        (internet(), (Link(20e-3, 12.5e6), 1, 10e9)),
        (one_host(workers=4), (Link(1e-6, 10e9), 4, 10e9)),
    ],
)
def test_presets_say_their_numbers_in_bytes_and_seconds(cluster: Cluster, expected: tuple[Link, int, float]) -> None:
    network, workers_per_host, flops_per_s = expected
    assert (cluster.network.latency_s, cluster.network.bytes_per_s) == pytest.approx(
        (network.latency_s, network.bytes_per_s)
    )
    assert (cluster.workers_per_host, cluster.flops_per_s) == (workers_per_host, flops_per_s)


def test_hosts_fill_up_one_after_the_other() -> None:
    assert replace(CLUSTER, workers_per_host=3).hosts(8) == (0, 0, 0, 1, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Link(-1.0, 1.0), "a link needs latency_s >= 0 and bytes_per_s > 0"),
        (lambda: Link(0.0, 0.0), "a link needs latency_s >= 0 and bytes_per_s > 0"),
        (lambda: Cluster(Link(0, 1), workers_per_host=0), "workers_per_host >= 1 and flops_per_s > 0, got 0"),
        (lambda: Crash(0), "a crash happens at a step or at a time: give one of them"),
        (lambda: Crash(0, step=1, at_s=1.0), "a crash happens at a step or at a time: give one of them"),
        (lambda: Crash(0, at_s=-1.0), "a crash needs at_s >= 0"),
        (lambda: Pause(0, step=1, seconds=-1.0), "a pause needs seconds >= 0"),
        (lambda: uniform(1.5), r"spread must be in \[0, 1\], got 1.5"),
        (lambda: lognormal(-0.1), "sigma must be >= 0, got -0.1"),
        (lambda: occasional(0.1, 0.5), r"probability in \[0, 1\] and factor >= 1, got 0.1 and 0.5"),
        (lambda: slow_host(0, 0.0), "factor must be positive, got 0.0"),
        (lambda: VirtualWorld(replace(CLUSTER, faults=(Crash(4, step=0),)), 4), r"Crash\(rank=4, .* hits no rank"),
        (lambda: VirtualWorld(CLUSTER, 0), "a world needs at least one rank, got 0"),
    ],
)
def test_impossible_clusters_are_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


# ---------------------------------------------------------------------- stragglers


def draws(stragglers: Stragglers, count: int = 20_000, host: int = 0) -> list[float]:
    random = Random(1)
    return [stragglers(random, host) for _ in range(count)]


@pytest.mark.parametrize(
    ("stragglers", "mean", "middle"),
    [
        (constant(), 1.0, 1.0),
        (uniform(0.5), 1.0, 1.0),
        (exponential(), 1.0, 0.6931),  # ln 2
        (lognormal(0.3), 1.0460, 1.0),  # exp(sigma^2 / 2)
        (occasional(0.02, 5.0), 1.08, 1.0),
        (slow_host(0, 3.0), 3.0, 3.0),
        (slow_host(1, 3.0), 1.0, 1.0),
        (slow_host(0, 3.0, others=uniform(0.5)), 3.0, 3.0),
    ],
)
def test_mean_and_median_of_a_distribution(stragglers: Stragglers, mean: float, middle: float) -> None:
    factors = draws(stragglers)
    assert fmean(factors) == pytest.approx(mean, rel=0.03)
    assert median(factors) == pytest.approx(middle, rel=0.03)


def test_two_percent_of_steps_take_five_times_as_long() -> None:
    factors = draws(occasional())
    assert set(factors) == {1.0, 5.0}
    assert factors.count(5.0) / len(factors) == pytest.approx(0.02, rel=0.15)


def test_uniform_factors_keep_within_their_spread() -> None:
    factors = draws(uniform(0.25))
    assert 0.75 <= min(factors) < 0.76 < 1.24 < max(factors) <= 1.25


WHOLE, PARTS = (1.0,), (0.25, 0.5, 0.25)
"""The parts of a step: one, or forward, backward and update. A second in all."""


def step_times(
    stragglers: Stragglers, num_ranks: int, steps: int, parts: tuple[float, ...] = WHOLE, seed: int = 3
) -> list[float]:
    """Seconds of each synchronous step of 1 s of computations; the barrier itself is free."""

    async def program(port: Port) -> list[float]:
        ends = [0.0]
        for step in range(steps):
            await port.mark(step)
            for seconds in parts:
                await port.compute(lambda: None, flops=seconds)
            await port.barrier()
            ends.append(await port.now())
        return [end - begin for begin, end in pairwise(ends)]

    cluster = Cluster(Link(0.0, 1e9), flops_per_s=1.0, stragglers=stragglers)
    result = VirtualWorld(cluster, num_ranks, seed=seed).run(program).results[0]
    assert result is not None
    return result


@pytest.mark.parametrize("parts", [WHOLE, PARTS], ids=["whole", "parts"])
def test_a_synchronous_step_of_exponential_workers_takes_the_harmonic_number(parts: tuple[float, ...]) -> None:
    """E[max of N] = H_N: 3.60 for N = 20 (order statistics; Chen et al., 2016)."""
    harmonic = sum(1 / n for n in range(1, 21))
    assert harmonic == pytest.approx(3.60, abs=0.005)
    assert fmean(step_times(exponential(), 20, 2_500, parts)) == pytest.approx(harmonic, rel=0.02)


def test_a_synchronous_step_of_100_workers_of_which_2_percent_take_5_times_as_long_takes_4_47() -> None:
    """1 + 4 (1 - 0.98^100): one such worker is enough, with a step in any parts."""
    expected = 1 + 4 * (1 - 0.98**100)
    assert expected == pytest.approx(4.47, abs=0.005)
    alone = [step_times(occasional(0.02, 5.0), 1, 600, PARTS[1:], seed=seed) for seed in range(100)]
    slowest = fmean(max(times) for times in zip(*alone, strict=True)) / 0.75
    assert slowest == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "strategy",
    [
        strategies.sync_sgd(),
        strategies.sync_sgd(route=collectives.ring),
        strategies.one_bit_sgd(exact_below=0),
        strategies.delayed_sgd(),
        strategies.async_sgd(codec=bf16()),
        strategies.backup_workers(backups=0),
        strategies.downpour(),
    ],
    ids=str,
)
def test_a_worker_draws_once_a_step_whatever_it_computes(strategy: Strategy) -> None:
    steps, draws = 10, [0] * 4

    def counted(random: Random, host: int) -> float:
        if host < len(draws):  # the others are servers
            draws[host] += 1
        return random.expovariate(1.0)

    result = simulate(find("digits"), strategy, 4, ethernet(stragglers=counted), steps=steps, batch_size=4)
    assert sum(draws) == 4 * result.steps == 4 * steps
    if strategy.server is None:
        assert draws == [steps] * 4


@pytest.mark.parametrize("strategy", [strategies.sync_sgd(), strategies.backup_workers(backups=0)], ids=str)
def test_synchronous_steps_take_as_long_as_their_slowest_worker_draws(strategy: Strategy) -> None:
    """Σ over steps of the largest of the workers' draws, times their step's time; to 2 %."""
    steps, draws = 2, defaultdict[int, list[float]](list)

    def noted(random: Random, host: int) -> float:
        draws[host].append(random.expovariate(1.0) if host < 4 else 1.0)
        return draws[host][-1]

    def seconds(stragglers: Stragglers) -> float:
        cluster = Cluster(Link(1e-7, 1e12), flops_per_s=1e6, stragglers=stragglers)
        return simulate(find("digits"), strategy, 4, cluster, steps=steps, batch_size=128).seconds

    once_s = seconds(constant())
    computing_s = seconds(lambda random, host: 2.0 if host < 4 else 1.0) - once_s  # the server's time comes twice
    uneven_s = seconds(noted)
    slowest = fmean(max(draws[host][step] for host in range(4)) for step in range(steps))
    assert uneven_s == pytest.approx(once_s + computing_s * (slowest - 1), rel=0.02)


def test_a_synchronous_step_waits_for_the_slow_host() -> None:
    assert step_times(slow_host(host=2, factor=4.0), 4, 3) == [4.0, 4.0, 4.0]


def test_ranks_draw_from_streams_of_their_own() -> None:
    """Rank 0's draws do not depend on the number of the others."""

    async def program(port: Port) -> float:
        await port.compute(lambda: None, flops=1.0)
        return await port.now()

    cluster = replace(CLUSTER, stragglers=lognormal())
    two, three = (VirtualWorld(cluster, n).run(program).results for n in (2, 3))
    assert two == three[:2]
    assert len(set(three)) == 3
