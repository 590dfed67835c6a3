"""`polytempo validate` on runs of two real workers: it names the component that the prediction is wrong about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import polytempo as pt
from polytempo.cli.main import app
from polytempo.cluster import Cluster, Link
from polytempo.cluster.measured import to_toml
from polytempo.jobs import find

pytestmark = pytest.mark.process

FAR = Cluster(Link(2.0, 1e9), name="far")
"""A message takes two seconds."""
SLOW = Cluster(Link(1e-6, 1e10), flops_per_s=1e6, name="slow")
"""A step computes for seconds."""


def validated(run: Path, cluster: Cluster) -> dict[str, Any]:
    file = run / f"{cluster.name}.toml"
    file.write_text(to_toml(cluster), encoding="utf-8")
    asked = ["validate", str(run), "--cluster", str(file)]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    plain: dict[str, Any] = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert f"most of the error: {plain['most_of_the_error']}, predicted " in shown.stdout
    return plain


def bounded(run: Path, bound: dict[str, Any] | None) -> Path:
    """The folder of the run, with that bound in its result: a measured one depends on the machine."""
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"bound": bound}))
    return run


@pytest.mark.parametrize(
    ("strategy", "communication"),
    [
        (pt.strategies.sync_sgd(), {"all_reduce"}),
        (pt.strategies.local_sgd(period=2), {"all_reduce"}),
        (pt.strategies.ssp(2), {"take"}),  # so that both workers take about half of the steps
    ],
    ids=str,
)
def test_a_real_run_beside_wrong_clusters(strategy: Any, communication: set[str], tmp_path: Path) -> None:
    pt.run(find("digits"), strategy, workers=2, steps=16, out=tmp_path / "run", threads=1)
    far = validated(bounded(tmp_path / "run", None), FAR)
    said = {"text": "Computing bounds this run.", "tried": {"workers": 4}}
    slow = validated(bounded(tmp_path / "run", said), SLOW)
    assert far["most_of_the_error"] in communication
    assert slow["most_of_the_error"] == "computing"
    assert far["bound"] is None
    priced = slow["bound"]["priced"]
    assert priced == pytest.approx(2.0, rel=0.05), "computing is nearly all of a step there"
    text = f"{said['text']} Priced on this cluster: {priced:.2f} times the samples per second."
    assert slow["bound"]["text"] == text
    for found in (far, slow):
        assert found["components"][0]["predicted_s"] > found["components"][0]["measured_s"]
        steps = [step["measured_s"] for step in found["steps"]]
        assert len(steps) >= 4
        parts = sum(part["measured_s"] for part in found["components"])
        assert parts == pytest.approx(sum(steps) / len(steps), rel=1e-6)
