"""A comparison keeps ended runs, whether others fail or not, and goes on from there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import LBFGS

import polytempo as pt
from polytempo.cli.options.folder import holds_run
from polytempo.core import NotFinite
from polytempo.runs import compare as comparison
from polytempo.runs.compare import ComparisonIncomplete
from polytempo.runs.frame.rehearsal import _rehearsed
from polytempo.spec.result import Result
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

JOB = pt.jobs.find("digits")
NAMES = ["sync_sgd", "gossip", "local_sgd"]
EPOCHS = 3.0


class Runs:
    """Runs that train nothing; a strategy's name -> the error of its run."""

    def __init__(self, raised: dict[str, BaseException]) -> None:
        self.raised, self.begun = raised, list[tuple[str, bool]]()

    def __call__(self, spec: RunSpec, *_: object) -> Result:
        name, out = str(spec.strategy).partition("(")[0], spec.options.out
        self.begun.append((name, spec.options.resume))
        assert isinstance(out, Path)
        (out / "checkpoint" / "step-1").mkdir(parents=True, exist_ok=True)
        if name in self.raised:
            raise self.raised[name]
        numbers: dict[str, Any] = dict.fromkeys(
            ("samples", "seconds", "samples_per_s", "loss", "accuracy", "train_loss", "threads", "steps"), 1
        )
        result = Result(
            job=spec.job.name,
            strategy=str(spec.strategy),
            world="process",
            workers=spec.workers,
            epochs=EPOCHS,
            bytes_sent_per_rank=1.0,
            communication_share=0.5,
            batch_size=spec.batch_size,
            seed=spec.seed,
            parameters_sha256=None,
            trace_hash="",
            **numbers,
        )
        result.write(out)
        return result


def compared(monkeypatch: pytest.MonkeyPatch, raised: dict[str, BaseException], **options: Any) -> Runs:
    runs = Runs(raised)
    monkeypatch.setattr(comparison, "prepare", lambda specs, engine: None)
    monkeypatch.setattr(comparison, "performed", runs)
    try:
        pt.compare(JOB, NAMES, epochs=int(EPOCHS), **options)
    finally:
        listed = json.loads((options["out"] / "compare.json").read_text())
        names = [each["strategy"].partition("(")[0] for each in listed]
        assert names == [name for name in NAMES if name not in raised or isinstance(raised[name], NotFinite)]
        assert holds_run(options["out"])
    return runs


def test_what_has_ended_is_kept_where_the_second_is_interrupted_and_resume_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "all"
    with pytest.raises(KeyboardInterrupt):
        compared(monkeypatch, {"gossip": KeyboardInterrupt(), "local_sgd": KeyboardInterrupt()}, out=out)
    page = (out / "report.html").read_text()
    assert "gossip(graph=ring_graph, period=1) has not ended: it was interrupted" in page
    assert (out / "compare.png").is_file()
    runs = compared(monkeypatch, {}, out=out, resume=True)
    assert runs.begun == [("gossip", True), ("local_sgd", False)], "one had saved something, one had not begun"
    assert "has not ended" not in (out / "report.html").read_text()
    assert compared(monkeypatch, {}, out=out, resume=True).begun == []


def test_the_others_go_on_where_one_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ComparisonIncomplete, match=r"^gossip\(.*: no such graph$") as raised:
        compared(monkeypatch, {"gossip": ValueError("no such graph")}, out=tmp_path / "all")
    assert [result.strategy.partition("(")[0] for result in raised.value.results] == ["sync_sgd", "local_sgd"]
    assert "has not ended: no such graph" in (tmp_path / "all" / "report.html").read_text()


def test_a_comparison_of_other_runs_does_not_take_these(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compared(monkeypatch, {}, out=tmp_path / "all")
    with pytest.raises(ValueError, match="seed=0, and not 1"):
        pt.compare(JOB, NAMES, epochs=int(EPOCHS), out=tmp_path / "all", resume=True, seed=1)


def test_what_shards_cannot_do_is_refused_before_anything_runs() -> None:
    """Shards have parts of the parameters, and L-BFGS looks at all of them."""
    job = replace(JOB, optimizer=lambda parameters, lr: LBFGS(parameters, lr))
    specs = [RunSpec.of(job, each, 2, RunOptions()) for each in (pt.strategies.sync_sgd(), pt.strategies.async_sgd())]
    with pytest.raises(ValueError, match="LBFGS"), torch.random.fork_rng():
        _rehearsed(specs)
