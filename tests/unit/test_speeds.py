"""Speeds of kernels: their charges, their fit, and their file."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
import torch

from polytempo.cluster import (
    Cluster,
    CollectiveLink,
    JobPace,
    KernelSpeed,
    Link,
    Speeds,
    correlated,
    ethernet,
    slow_host,
    slow_spells,
)
from polytempo.cluster.cluster_file import from_toml
from polytempo.cluster.fit import Sample, fitted, nonnegative
from polytempo.cluster.measured import to_toml
from polytempo.cluster.slow_spells import measured_steps, steps_of
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.runs.calibration.measurement import correlation_of, quantiles_of, spread_of

SPEEDS = Speeds(
    (
        ("elementwise", KernelSpeed(1e-6, 1e-9, 0.0)),
        ("encode top_k(ratio=0.01)", KernelSpeed(1e-5, 2e-9, 0.0)),
        ("product", KernelSpeed(2e-6, 1e-10, 1e-11)),
    )
)


def test_a_cost_is_a_vector() -> None:
    assert SPEEDS.seconds([KernelUse("product", 3, 1e6, 1e8)]) == pytest.approx(6e-6 + 1e-4 + 1e-3)


def test_a_kernel_that_was_not_measured_is_another_one() -> None:
    assert SPEEDS.of("encode top_k(ratio=0.1)") == SPEEDS.of("encode top_k(ratio=0.01)")
    assert SPEEDS.of("update Nonesuch") == SPEEDS.of("elementwise")
    assert [SPEEDS.measured(name) for name in ("encode top_k(ratio=0.5)", "encode int8()")] == [True, False]
    with pytest.raises(ValueError, match="must name 'elementwise'"):
        Speeds((("product", KernelSpeed()),))


def test_a_job_that_was_measured_has_a_pace() -> None:
    speeds = replace(SPEEDS, jobs=(JobPace("digits", 650, 1.5), JobPace("digits", 651, 2.0)))
    assert [speeds.pace("digits", 651), speeds.pace("digits", 652), speeds.pace("chars", 650)] == [2.0, 1.0, 1.0]
    counted = replace(speeds, jobs=(*speeds.jobs, JobPace("chars", 9, 0.5, 2), JobPace("chars", 9, 0.75, 4)))
    by_workers = [counted.pace("chars", 9, workers) for workers in (1, 2, 3, 4, 8)]
    assert by_workers == [0.5, 0.5, 0.75, 0.75, 0.75], "of the next larger number, or of the largest"
    text = to_toml(Cluster(Link(0, 1), speeds=counted))
    assert from_toml(text).speeds == counted
    assert from_toml(text.replace("workers = 0\n", "")).speeds == counted, "a file of before has none"
    mistakes = (("parameters = 650", "parameters = 0"), ("pace = 1.5", "pace = -1.0"), ("workers = 4", "workers = -4"))
    for wrong, said in mistakes:
        with pytest.raises(ValueError, match=r"jobs '(digits|chars)'.*must be a"):
            from_toml(text.replace(wrong, said))


def test_a_declared_cluster_has_one_speed_and_servers_theirs() -> None:
    uses = (KernelUse("product", 1, 0, 1e8),)
    cluster = Cluster(Link(0, 1), flops_per_s=1e9, server_flops_per_s=1e8)
    assert (cluster.computing_s(2e9, uses), cluster.computing_s(2e9, uses, server=True)) == (2.0, 20.0)
    measured = replace(cluster, speeds=SPEEDS, server_speeds=Speeds((("elementwise", KernelSpeed(call_s=7.0)),)))
    assert measured.computing_s(2e9, uses) == pytest.approx(2e-6 + 1e-3)
    assert measured.computing_s(2e9, uses, server=True) == 7.0
    assert measured.computing_s(2e9) == 2.0, "what names no kernel is charged by its operations"


def test_headers_take_their_share_of_the_rate() -> None:
    assert ethernet(gbit_per_s=1, header_share=0.045).network.bytes_per_s == pytest.approx(119.375e6)
    with pytest.raises(ValueError, match="header_share must be in"):
        ethernet(header_share=1.0)


def test_collectives_have_links_of_their_own_by_place() -> None:
    within, between = CollectiveLink(3, (0,), (3,)), CollectiveLink(4, (8, 40), (4, 8))
    cluster = Cluster(
        Link(1, 1), memory=Link(2, 2), collectives=(("memory all_reduce", within), ("network x", between))
    )
    found = [
        cluster.slowest_link(hosts, kind).latency_s
        for hosts, kind in (((0, 0), "all_reduce"), ((0, 1), "all_reduce"), ((0, 1), "x"), ((0, 0), "x"))
    ]
    assert found == [3, 1, 4, 2]
    by_size = [cluster.slowest_link((0, 1), "x", num_bytes) for num_bytes in (0, 8, 16, 40, 1000)]
    assert by_size == [Link(latency_s, 4) for latency_s in (4, 4, 5, 8, 8)]


def test_a_fit_finds_the_speeds_that_made_the_samples() -> None:
    draw, samples = random.Random(7), []
    for _ in range(40):
        calls, num_bytes, flops = draw.randint(1, 5), 10 ** draw.uniform(3, 7), 10 ** draw.uniform(3, 9)
        seconds = calls * 2e-6 + num_bytes * 1e-10 + flops * 2e-11
        samples.append(Sample((KernelUse("product", calls, num_bytes, flops),), seconds))
        both = (KernelUse("encode", 1, num_bytes), KernelUse("decode", calls, num_bytes))
        samples += [Sample(both, 1e-5 + calls * 1e-6 + num_bytes * 5e-10), Sample(both[:1], 1e-5 + num_bytes * 3e-10)]
    found = fitted(samples)
    assert found["product"][:3] == pytest.approx((2e-6, 1e-10, 2e-11))
    assert found["encode"][:3] == pytest.approx((1e-5, 3e-10, 0.0))
    assert found["decode"][:3] == pytest.approx((1e-6, 2e-10, 0.0))
    assert max(speed.error for speed in found.values()) < 1e-9


def test_no_speed_is_negative() -> None:
    matrix = torch.tensor([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=torch.float64)
    falling = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    assert nonnegative(matrix, falling).tolist() == pytest.approx([2.0, 0.0])


def test_a_file_holds_all_that_was_measured() -> None:
    steps = measured_steps((0.5, 1.0, 3.0), 0.25)
    cluster = Cluster(
        Link(1e-4, 1e8, duplex=0.75),
        memory=Link(1e-6, 1e9),
        speeds=SPEEDS,
        server_speeds=SPEEDS,
        server_flops_per_s=3e9,
        collectives=(("memory all_reduce", CollectiveLink(2e9, (8.0, 4096.0), (1e-5, 3e-5))),),
        stragglers=steps,
        busy_stragglers=measured_steps((0.5, 2.0, 9.0), 0.5),
        name="mine",
    )
    text = to_toml(cluster, spread={"steps": 0.1})
    assert from_toml(text) == cluster
    assert '"steps" = 0.1' in text
    for old, new, why in (
        ("call_s = 1e-06", 'call_s = "x"', "kernels 'elementwise'.call_s = 'x' must be a number"),
        ("correlation = 0.25", "correlation = 1.0", "needs at least two ascending quantiles"),
        ("quantiles = [0.5, 2.0, 9.0]", "quantiles = 9", "busy_stragglers.quantiles = 9 must be a list"),
        ("quantiles = [0.5, 1.0, 3.0]", "quantiles = [0.5, 1.0, inf]", "quantiles above 0, none infinite"),
        ('name = "elementwise"', "name = 3", "kernels 3.name = 3 must be a text"),
        ("duplex = 0.75", "duplex = 0.1", "duplex is from 0.5"),
        ("sizes = [8.0, 4096.0]", "sizes = [8.0]", "'memory all_reduce': .* a latency for each of its ascending sizes"),
        ("sizes = [8.0, 4096.0]", "sizes = 8", "collectives 'memory all_reduce'.sizes = 8 must be a list"),
        ("latencies_s = [1e-05", "latencies_s = [-1e-05", "needs latencies_s >= 0"),
    ):
        with pytest.raises(ValueError, match=why):
            from_toml(text.replace(old, new, 1), "f.toml")


def test_a_collective_with_one_latency_is_read() -> None:
    row = '[[collectives]]\nname = "network all_reduce"\nlatency_s = 2e-3\nbytes_per_s = 1e8\n\n[end]'
    text = to_toml(Cluster(Link(1e-4, 1e8), name="old")).replace("version = 4", "version = 3").replace("[end]", row)
    assert from_toml(text).collectives == (("network all_reduce", CollectiveLink(1e8, (0.0,), (2e-3,))),)


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_older_version_is_read(version: int) -> None:
    text = to_toml(Cluster(Link(1e-4, 1e8), name="old")).replace("version = 4", f"version = {version}")
    assert from_toml(text.partition("[end]")[0]).speeds is None


def factors(distribution: object, steps: int, step_s: float = 1.0) -> list[float]:
    at = distribution.begun(random.Random(3), 0)  # type: ignore[attr-defined]
    return [at(step * step_s) for step in range(steps)]


def test_slow_spells_last_as_long_as_they_say() -> None:
    found = factors(slow_spells(every_s=8.0, duration_s=2.0, factor=5.0), 40_000, 0.1)
    assert set(found) == {1.0, 5.0}
    slow = [value == 5.0 for value in found]
    begun = sum(b and not a for a, b in pairwise(slow))
    assert sum(slow) / len(slow) == pytest.approx(0.2, abs=0.03)
    assert 0.1 * sum(slow) / begun == pytest.approx(2.0, rel=0.15), "seconds of a spell"


def test_correlated_steps_have_that_median_spread_and_correlation() -> None:
    found = factors(correlated(sigma=0.4, correlation=0.8), 20_000)
    assert median(found) == pytest.approx(1.0, abs=0.05)
    assert correlation_of(found) == pytest.approx(0.8, abs=0.02)
    again = measured_steps(quantiles_of(found), correlation_of(found))
    assert correlation_of(factors(again, 20_000)) == pytest.approx(0.8, abs=0.03)
    assert spread_of(factors(again, 20_000)) == pytest.approx(spread_of(found), rel=0.1)
    assert steps_of(correlated()) is None
    with pytest.raises(ValueError, match="slow_host multiplies independent draws"):
        slow_host(others=correlated())
