"""Branches on threads in whole runs: the same bits as without, resumed, served; and the output of `tune threads`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import polytempo as pt
import warm
from branched_job import job, undecided

pytestmark = pytest.mark.process

FILE = Path(__file__).parents[1] / "branched_job.py"


def test_a_run_has_the_same_bits_with_branches_on_threads(tmp_path: Path) -> None:
    """Two workers, scores and a checkpoint that the other kind of run goes on from."""
    kinds = {"plain": {"threads": 1}, "threaded": {"threads": 1, "inter_threads": 2}}
    found = []
    for first, second in (("plain", "plain"), ("threaded", "threaded"), ("threaded", "plain")):
        out = tmp_path / f"{first}-{second}"
        for number, kind in enumerate((first, second), start=1):
            more = {**kinds[kind], "steps": 4 * number, "resume": number == 2}
            result = pt.run(job, pt.strategies.sync_sgd(pt.collectives.ring), workers=2, out=out, **more)
        found.append((result.parameters_sha256, result.loss, result.accuracy))
    assert found[0] == found[1] == found[2]


def test_workers_of_a_parameter_server_have_threads_as_well() -> None:
    result = pt.run(job, pt.strategies.async_sgd(), workers=2, steps=4, inter_threads=2)
    assert (result.steps, result.threads) == (4, 1)


def test_a_model_that_cannot_be_traced_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.sum\(\) > 0.*or leave out inter, and Undecided runs as it is"):
        pt.run(undecided, pt.strategies.sync_sgd(), workers=2, steps=1, inter_threads=2, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_tune_threads_measures_every_division_and_names_one(tmp_path: Path) -> None:
    quick = ["--cores", "2", "--rounds", "1", "--turn-s", "0.01"]
    done = warm.run(["-m", "polytempo", "tune", "threads", f"{FILE}:job", *quick, "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["benchmark"] == "threads"
    divisions = {(row["workers"], row["threads"], row["inter_threads"]) for row in found["rows"]}
    assert divisions == {(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1)}
    rates = [row["samples_per_s"]["median"] for row in found["rows"]]
    assert rates == sorted(rates, reverse=True)
    assert min(rates) > 0
    assert found["best"] == found["rows"][0]
    assert found["margin"]["median"] > 0
    assert found["missing"] == {}
    assert list(tmp_path.iterdir()) == []
