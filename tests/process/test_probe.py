"""Processes that measure each other, on engines of this host."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import polytempo as pt
from polytempo.cluster import Cluster, JobPace, KernelSpeed, Link, Speeds
from polytempo.cluster.cluster_file import from_toml
from polytempo.cluster.measured import cluster_of, to_toml
from polytempo.cluster.slow_spells import steps_of
from polytempo.core import Strategy
from polytempo.engines.engine import EngineSetup
from polytempo.jobs import find
from polytempo.runs.calibration import job_pace, kernel_samples, measurement, server_exchange
from polytempo.runs.calibration.calibrate import calibrate
from polytempo.runs.calibration.measurement import NO_EXCHANGE, small_job
from polytempo.runs.calibration.probe import measure
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

pytestmark = pytest.mark.process


@pytest.mark.parametrize("engine", [pt.engines.local(), pt.engines.subprocess()], ids=["local", "subprocess"])
def test_two_processes_of_one_host(engine: EngineSetup, tmp_path: Path) -> None:
    spec = RunSpec.of(find("digits"), pt.strategies.sync_sgd(), 2, RunOptions())
    found = measure(engine, spec, "here")
    assert (found.engine, len(found.hosts), found.hosts[0].workers, found.between) == ("here", 1, 2, ())
    [link] = found.within
    assert 0 < link.latency_s < 1
    assert link.bytes_per_s > 1e5
    assert found.hosts[0].flops_per_s > 1e6
    assert from_toml(to_toml(cluster_of(found), found)).memory == cluster_of(found).memory


def test_a_calibrated_host_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small samples: processes are forked from this one."""
    monkeypatch.setattr(kernel_samples, "_PERCEPTRONS", (((16, 8, 10), 4), ((64, 32, 10), 8)))
    monkeypatch.setattr(kernel_samples, "_CONVOLUTIONS", ())
    monkeypatch.setattr(kernel_samples, "_SHAPES", ((48, 48),))
    few = {kernel: run._replace(steps=20) for kernel, run in measurement.SMALL_RUNS.items()}
    monkeypatch.setattr(measurement, "SMALL_RUNS", few)
    short = {name: run._replace(steps=4) for name, run in measurement.WHOLE_RUNS.items()}
    monkeypatch.setattr(measurement, "WHOLE_RUNS", short)
    brief = {name: run._replace(steps=20) for name, run in server_exchange._RUNS.items()}
    monkeypatch.setattr(server_exchange, "_RUNS", brief)
    monkeypatch.setattr(measurement, "_TURNS", 1)
    monkeypatch.setattr(measurement, "_STEPS", 20)
    found = calibrate(pt.engines.local(), "here", 2)
    assert found.cluster.speeds is not None
    kernels = dict(found.cluster.speeds.kernels)
    expected = (
        "product",
        "elementwise",
        "update SGD momentum",
        "encode feedback(one_bit())",
        "scale",
        "step",
        "sample",
        "message",
        "server step",
        "server exchange",
    )
    assert set(expected) <= set(kernels)
    assert all(min(speed) >= 0 for speed in kernels.values())
    assert {name for name, _ in found.cluster.collectives} == {
        f"memory all_{kind}" for kind in ("reduce", "gather", "to_all")
    }
    again = from_toml(to_toml(found.cluster, found.measured, found.spread))
    assert (again.speeds, again.memory) == (found.cluster.speeds, found.cluster.memory)
    assert again.cores == found.cluster.cores == len(os.sched_getaffinity(0)), "one host, whose cores all share"
    assert again.busy_stragglers == found.cluster.busy_stragglers is not None
    result = pt.simulate(find("digits"), pt.strategies.one_bit_sgd(), 2, again, steps=8, meta=True)
    assert 1e-5 < result.seconds / result.steps < 10


def test_a_job_of_ones_own_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps take three times the kernels' time in this test."""
    speeds = Speeds((("elementwise", KernelSpeed(call_s=1e-5)), ("step", KernelSpeed(call_s=1e-4))))
    cluster = Cluster(Link(1e-5, 1e9), workers_per_host=2, speeds=speeds)
    step_s = {pace: _without_exchange(cluster, pace) for pace in (1.0, 2.0, 3.0)}
    assert step_s[3.0] - step_s[2.0] == pytest.approx(step_s[2.0] - step_s[1.0])
    factors = [9.0] * 10 + [0.9, 1.0, 1.1, 1.0, 1.0] * 4  # the first ten are warm-up
    monkeypatch.setattr(
        job_pace, "steps_of_ranks", lambda events: [[f * step_s[3.0] for f in factors] for _ in range(2) if events]
    )
    found = job_pace.with_pace(cluster, pt.engines.local(), small_job(), 2, RunOptions(batch_size=4)).cluster
    assert found.speeds is not None
    [(name, parameters, pace, workers)] = found.speeds.jobs
    assert (name, parameters, workers) == ("small", 64 * 64 + 64 + 640 + 10, 2)
    assert pace == pytest.approx(3.0)
    varied = steps_of(found.stragglers)  # type: ignore[arg-type]  # of measured steps
    assert varied is not None
    assert (varied[0][0], varied[0][10], varied[0][20]) == pytest.approx((0.9, 1.0, 1.1))
    with pytest.raises(ValueError, match="has one speed for everything"):
        job_pace.with_pace(replace(cluster, speeds=None), pt.engines.local(), small_job(), 2, RunOptions())


def test_what_a_byte_of_its_exchange_costs_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of a job with half a million parameters: with an exchange it takes 2 ns a byte more than predicted."""
    speeds = Speeds((("elementwise", KernelSpeed(call_s=1e-5)), ("exchange", KernelSpeed(call_s=1e-4))))
    cluster = Cluster(Link(1e-5, 1e9), Link(1e-5, 1e9), workers_per_host=2, speeds=speeds)
    job, options = small_job(512, 1024), RunOptions(batch_size=4)
    num_bytes = 4 * sum(p.numel() for p in job.model().parameters())

    def said_s(strategy: Strategy) -> float:
        result = pt.simulate(job, strategy, 2, cluster, replace(options, steps=4, epochs=1000))
        return result.seconds / result.steps

    taken_s = iter([said_s(NO_EXCHANGE), said_s(pt.strategies.sync_sgd()) + 2e-9 * num_bytes])
    monkeypatch.setattr(job_pace, "steps_of_ranks", lambda events: [[next(taken_s)] * 20] * 2 if events else [])
    found = job_pace.with_pace(cluster, pt.engines.local(), job, 2, options).cluster.speeds
    assert found is not None
    assert found.of("exchange")[:3] == pytest.approx((1e-4, 2e-9, 0.0))


def _without_exchange(cluster: Cluster, pace: float) -> float:
    assert cluster.speeds is not None
    paced = replace(cluster, speeds=replace(cluster.speeds, jobs=(JobPace("small", 4810, pace),)))
    options = RunOptions(batch_size=4, steps=4, epochs=1000)
    return pt.simulate(small_job(), measurement.NO_EXCHANGE, 2, paced, options).seconds / 4
