"""Processes that measure each other, on engines of this host."""

from __future__ import annotations

from pathlib import Path

import pytest

import polytempo as pt
from polytempo.cluster.measured import cluster_of, from_toml, to_toml
from polytempo.engines.engine import EngineSetup
from polytempo.jobs import find
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
