"""Processes that measure each other, on engines of this host."""

from __future__ import annotations

from pathlib import Path

import pytest

import polytempo as pt
from polytempo.cluster.measured import cluster_of, from_toml, to_toml
from polytempo.engines.engine import EngineSetup
from polytempo.jobs import find
from polytempo.runs.calibration import kernel_samples, measurement
from polytempo.runs.calibration.calibrate import calibrate
from polytempo.runs.probe import measure
from polytempo.spec.options import RunOptions
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
    """With few and small samples: processes are forked from this one."""
    monkeypatch.setattr(kernel_samples, "_PERCEPTRONS", (((16, 8, 10), 4), ((64, 32, 10), 8)))
    monkeypatch.setattr(kernel_samples, "_CONVOLUTIONS", ())
    monkeypatch.setattr(kernel_samples, "_SHAPES", ((48, 48),))
    monkeypatch.setattr(measurement, "_MANY", 20)
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
    )
    assert set(expected) <= set(kernels)
    assert all(min(speed) >= 0 for speed in kernels.values())
    assert {name for name, _ in found.cluster.collectives} == {
        f"memory all_{kind}" for kind in ("reduce", "gather", "to_all")
    }
    again = from_toml(to_toml(found.cluster, found.measured, found.spread))
    assert (again.speeds, again.memory) == (found.cluster.speeds, found.cluster.memory)
    result = pt.simulate(find("digits"), pt.strategies.one_bit_sgd(), 2, again, steps=8, meta=True)
    assert 1e-5 < result.seconds / result.steps < 10
