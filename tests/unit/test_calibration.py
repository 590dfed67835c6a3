"""Measurements of processes for a cluster's description, and their sums."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polytempo as pt
from polytempo.cluster import Cluster, KernelSpeed, Link, Speeds, constant, lognormal
from polytempo.cluster.measured import to_toml
from polytempo.cluster.slow_spells import measured_steps
from polytempo.core import Port
from polytempo.planner.forecast import uncertainty_of
from polytempo.runs.calibration import server_exchange
from polytempo.runs.calibration.calibrate import (
    assembled,
    exchange_speed,
    message_speed,
    simulated_s,
    with_transforms_pace,
)
from polytempo.runs.calibration.earlier import SpeedChange, compared
from polytempo.runs.calibration.measurement import WHOLE_RUNS, quantiles_of
from polytempo.worlds import VirtualWorld


def told(rank: int, hosts: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """The answer of one of two ranks: an all-reduce takes 40 µs + 1 ns a byte, an all-gather 10 µs + 2 ns a byte."""
    pairs = [(0, 1, 1e-4, 1e8, 0.75, 0.2)]
    if hosts == (0, 1):
        pairs = [(0, 1, 1e-4, 1e8, 0.9, 0.2), (1, 0, 3e-4, 3e8, 1.0, 0.4)]
    return {
        "name": "n",
        "host": hosts[rank],
        "links": [pair for pair in pairs if pair[0] == rank],
        "collectives": [
            ("all_reduce", [(8, 2e-5), (1000, 4e-5 + 1e-6), (4000, 4e-5 + 4e-6), (8000, 4e-5 + 8e-6)]),
            ("all_gather", [(8, 1e-5), (4000, 1e-5 + 8e-6), (8000, 1e-5 + 16e-6)]),
        ],
        "samples": [
            ([["elementwise", 1, 1000.0, 0.0]], 3e-6),
            ([["elementwise", 1, 2000.0, 0.0]], 4e-6),
            ([["operator", 10, 0.0, 0.0]], 1e-5),
        ],
        "flops_per_s": 2e9,
        "steps": [1.0, 1.1] * 50,
        "busy_steps": [1.0, 3.0] * 50,
        "small": {},
        "whole": [],
        "on_processor": [],
        "cores": 2,
        "machine": "m",
    }


def test_hosts_that_share_a_machine_are_counted() -> None:
    answers = [told(rank, (0, 1)) for rank in (0, 1)]
    shared = assembled("here", answers).cluster
    assert (shared.cores, shared.hosts_per_machine) == (2, 2)
    apart = assembled("here", [one | {"machine": f"m{rank}"} for rank, one in enumerate(answers)]).cluster
    assert (apart.cores, apart.hosts_per_machine) == (2, 1)
    assert assembled("here", [told(rank) for rank in (0, 1)]).cluster.hosts_per_machine == 1


@pytest.mark.parametrize(("hosts", "place"), [((0, 0), "memory"), ((0, 1), "network")])
def test_answers_add_up_to_a_cluster(hosts: tuple[int, int], place: str) -> None:
    cluster = assembled("here", [told(rank, hosts) for rank in (0, 1)]).cluster
    assert cluster.speeds is not None
    [(name, speed)] = cluster.speeds.kernels
    assert name == "elementwise"
    assert speed[:3] == pytest.approx((3e-6, 1e-9, 0.0)), "1 µs is that of any operator"
    expected = Link(1e-4, 1e8, 0.75) if place == "memory" else Link(2e-4, 2e8, 0.95)
    found = cluster.memory if place == "memory" else cluster.network
    assert tuple(vars(found).values()) == pytest.approx(tuple(vars(expected).values()))
    assert (cluster.network == cluster.memory) == (place == "memory"), "one host's network is its memory"
    assert cluster.stragglers == measured_steps(quantiles_of([1.0, 1.1] * 100), 0.0)
    assert cluster.busy_stragglers == measured_steps(quantiles_of([1.0, 3.0] * 100), 0.0)

    async def program(port: Port) -> tuple[float, float]:
        await port.all_reduce(torch.empty(1000))
        reduced_s = await port.now()
        await port.all_gather(torch.empty(1000))
        return reduced_s, await port.now() - reduced_s

    world = VirtualWorld(replace(cluster, stragglers=constant()), 2)
    assert world.run(program).results[0] == pytest.approx((4e-5 + 4e-6, 1e-5 + 8e-6)), "as they were measured"


def test_what_has_changed_since_an_earlier_file_widens_the_intervals(tmp_path: Path) -> None:
    """Kernels take twice as long, the sum half as long: as a part of the measurement, ln 2."""
    path = tmp_path / "cluster.toml"
    answers = [told(rank) for rank in (0, 1)]
    first = assembled("here", answers)
    assert compared(first, path) == (first, None), "there is no earlier file"
    path.write_text(to_toml(first.cluster, first.measured, first.spread))
    again, change = compared(first, path)
    assert change == SpeedChange(1.0, 1.0)
    assert (again.spread["kernels again"], again.spread["messages again"]) == (0.0, 0.0)
    assert first.cluster.speeds is not None
    slower = Speeds(tuple((name, KernelSpeed(*(2 * s for s in speed))) for name, speed in first.cluster.speeds.kernels))
    later = first._replace(cluster=replace(first.cluster, speeds=slower))
    later, change = compared(later, path)
    assert change == (pytest.approx(2.0), 1.0)
    assert later.spread["kernels again"] == pytest.approx(math.log(2))
    narrow, wide = (uncertainty_of(each.cluster, each.spread).computing for each in (first, later))
    assert wide == pytest.approx(math.hypot(narrow, math.log(2)))
    path.write_text(to_toml(later.cluster, later.measured, later.spread))
    assert compared(later, path)[0].spread["kernels again"] == pytest.approx(math.log(2)), "it may change back"
    others = assembled("elsewhere", answers)
    assert compared(others, path) == (others, None)
    path.write_text("no cluster")
    assert compared(first, path) == (first, None)


def test_what_messages_take_besides_their_link() -> None:
    """Two messages: 1 ms and 10 ns a byte more than a simulation of the same exchange."""
    cluster = assembled("here", [told(rank) for rank in (0, 1)]).cluster
    undisturbed = replace(cluster, stragglers=constant())

    def taken_s(run: str) -> float:
        besides_s = 2 * (1e-3 + 1e-8 * bytes_of(run)) if run.endswith("ring") else 0.0
        return simulated_s(WHOLE_RUNS[run], undisturbed, 2) + besides_s

    def bytes_of(run: str) -> float:
        return 4 * sum(p.numel() for p in WHOLE_RUNS[run].job.model().parameters()) / 2

    answer = {"whole": [{run: taken_s(run) for run in WHOLE_RUNS}]}
    speed = message_speed(cluster, [answer, answer])
    assert speed[:3] == pytest.approx((1e-3, 1e-8, 0.0))


def test_what_a_server_costs_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five runs as long as a simulation with 1 ms a step, 2 ms an exchange and 1 ns a byte, on a server that shares
    its workers' cores."""
    speeds = Speeds((("elementwise", KernelSpeed(call_s=1e-5)), ("serve", KernelSpeed(call_s=3e-4))))
    link = Link(1e-5, 1e10)
    cluster = Cluster(link, link, 2, cores=2, speeds=speeds, stragglers=lognormal(0.2))
    steps, exchanges = KernelSpeed(call_s=1e-3), KernelSpeed(call_s=2e-3, byte_s=1e-9)
    real = cluster.with_kernel("server step", steps).with_kernel("server exchange", exchanges)
    monkeypatch.setattr(
        server_exchange, "_measured_s", lambda run, setup, workers: server_exchange._simulated_s(run, real, workers)
    )
    found = server_exchange.with_server_exchange(cluster, pt.engines.local(), 2).speeds
    assert found is not None
    assert found.of("server step")[:3] == pytest.approx(steps[:3], rel=0.1)
    assert found.of("server exchange")[:3] == pytest.approx(exchanges[:3], rel=0.1)
    with pytest.raises(ValueError, match="has one speed for everything"):
        replace(cluster, speeds=None).with_kernel("server step", steps)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_what_a_byte_of_an_exchange_costs_besides(hosts: tuple[int, int]) -> None:
    """2 ns of the large model's on one host; and codecs that take three times as long within steps as they do alone."""
    apart = hosts == (0, 1)
    alone = assembled("here", [told(rank, hosts) for rank in (0, 1)]).cluster
    assert alone.speeds is not None
    coded = {"encode feedback(one_bit())": 1e-10, "decode feedback(one_bit())": 2e-10, "low_rank project": 4e-10}
    kernels = {
        "exchange": KernelSpeed(call_s=1e-4),
        **{name: KernelSpeed(byte_s=byte_s) for name, byte_s in coded.items()},
    }
    cluster = replace(alone, speeds=Speeds((*alone.speeds.kernels, *kernels.items())))

    def taken(cluster: Cluster) -> dict[str, float]:
        return {name: simulated_s(run, replace(cluster, stragglers=constant()), 2) for name, run in WHOLE_RUNS.items()}

    def with_kernels(of: Cluster, **speeds: KernelSpeed) -> Cluster:
        assert of.speeds is not None
        return replace(of, speeds=Speeds(tuple((dict(of.speeds.kernels) | speeds).items())))

    by_byte = KernelSpeed(call_s=1e-4, byte_s=2e-9)
    answer = {"whole": [taken(with_kernels(cluster, exchange=by_byte))]}
    expected = KernelSpeed(call_s=1e-4) if apart else by_byte
    assert exchange_speed(cluster, [answer, answer])[:3] == pytest.approx(expected[:3])
    slow = {name: KernelSpeed(byte_s=3 * byte_s) for name, byte_s in coded.items()}
    slower = with_kernels(cluster, **slow)
    if apart:  # on a processor messages take no time
        slower = replace(slower, network=Link(1e-9, 1e15), memory=Link(1e-9, 1e15), collectives=())
    answer = {"on_processor" if apart else "whole": [taken(slower)]}
    found = with_transforms_pace(cluster, [answer, answer]).speeds
    assert found is not None
    for name, byte_s in coded.items():
        assert found.of(name).byte_s == pytest.approx(3 * byte_s), name
    assert found.of("elementwise") == alone.speeds.of("elementwise")
