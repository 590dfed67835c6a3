"""Laws of strategies that cut a model into stages; the laws of both worlds are in `process/test_pipeline_runs`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import polytempo as pt
from laws.catalogue import STAGED, Row, label
from polytempo.partition.schedules import Schedule
from polytempo.partition.schedules.facts import facts
from polytempo.runs.frame import run_page as shown
from polytempo.training.checkpoint.checkpoint_folders import latest
from some_cases import ALL
from staged_job import job

every = pytest.mark.parametrize("row", STAGED, ids=label)


class Seen(NamedTuple):
    """The results of a virtual run. The trace's hash is over every operation of every rank, with its times."""

    parameters_sha256: str | None
    operations: str
    seconds: float
    steps: int
    train_loss: float | None


def seen(row: Row, workers: int, *, tested: bool = True, **options: Any) -> Seen:
    found = pt.simulate(job(tested=tested), row.make(), workers, threads=1, **options)
    return Seen(found.parameters_sha256, found.trace_hash, found.seconds, found.steps, found.train_loss)


@every
def test_watching_a_pipeline_changes_nothing(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and checkpoints cost no virtual time and no operation."""
    monkeypatch.setattr(shown, "write_report", lambda *_, **__: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # which disks need, and no other look at a folder
    workers = row.make().stages * (2 if "inner" in label(row) else 1)
    alone = seen(row, workers, tested=False)
    if ALL:
        assert seen(row, workers) == alone
    assert seen(row, workers, out=tmp_path, checkpoint_every=2) == alone
    assert latest(tmp_path / "checkpoint") is not None


@every
def test_one_stage_is_the_inner_strategy(row: Row) -> None:
    """Equal to the bit with one micro-batch, except where weights' gradients are computed apart. Dropout has other
    seeds."""
    strategy = row.make()
    options = {"stages": 1} | ({"micro_batches": 1} if "micro_batches" in str(strategy) else {})
    alone = getattr(pt.strategies, row.name)(**options | ({"parts": 1} if row.name == "interleaved" else {}))
    plain = job(dropout=0.0, tested=False)
    ours, expected = (pt.simulate(plain, strategy, 1, steps=4) for strategy in (alone, pt.strategies.sync_sgd()))
    assert ours.train_loss == pytest.approx(expected.train_loss, rel=1e-5)
    assert row.name == "zero_bubble" or ours.parameters_sha256 == expected.parameters_sha256


def test_rows_of_metrics_have_the_loss_of_the_last_stage(tmp_path: Path) -> None:
    pt.simulate(job(), pt.strategies.ddg(stages=2), 2, epochs=1, out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[0] is None  # after one step nothing has come back
    assert all(loss is not None for loss in losses[1:])


def test_rows_of_metrics_have_the_delay_of_each_stage(tmp_path: Path) -> None:
    """Metrics of updates that the first stage knows without waiting: K - 1 = 2 steps ago."""
    pt.simulate(job(), pt.strategies.ddg(stages=3), 6, steps=8, out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    delays = [row["delays"] for row in rows if row["kind"] == "train"]
    nothing = [None, None, None]
    assert delays[:5] == [nothing, nothing, [None, None, 0.0], [None, 0.0, 0.0], [0.0, 1.0, 0.0]]
    assert delays[5:] == [[1.0, 1.0, 0.0], [2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]


@every
def test_the_delay_of_each_stage_is_counted(row: Row) -> None:
    """The schedule's delay, once the pipeline is full."""
    schedule = row.make().schedule
    assert isinstance(schedule, Schedule)
    found = pt.simulate(job(tested=False), row.make(), schedule.stages, steps=8).stages
    assert found is not None
    told = [facts(schedule, stage) for stage in range(schedule.stages)]
    assert [each["most_delay"] for each in found] == [each.delay for each in told]
    assert all(each["updates"] == 8 for each in found)
    assert all(each["versions"] <= of.versions for each, of in zip(found, told, strict=True))
