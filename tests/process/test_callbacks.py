"""Callbacks of runs on real processes: all ranks follow rank 0's requests, and resumes go on with their states."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from torch import Tensor

import polytempo as pt
from polytempo.engines.processes.failures import WorkerDied
from polytempo.report.status.records import TestRow
from polytempo.report.status.stream import stream
from polytempo.spec.job_calls import data_of
from polytempo.training.checkpoint.checkpoint_folders import complete_in
from polytempo.training.job.evaluate import Evaluation, tensors_of

SMALL: dict[str, Any] = {"threads": 1, "batch_size": 32}


class StopAt(pt.callbacks.Callback):
    """Asks for the end after so many steps."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, 0

    def on_start(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen = 0

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> pt.callbacks.Control:
        self.seen += 1
        return pt.callbacks.Control(stop=facts.step >= self.step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("strategy", ["sync_sgd", "local_sgd(period=4)", "gpipe(stages=2)", "hogwild", "ssp"])
def test_all_ranks_stop_after_one_step(strategy: str) -> None:
    """The step depends on the machine, for no rank waits for the request; the result is a run of so many steps."""
    stop = StopAt(5)
    found = pt.run("digits", strategy, 2, epochs=60, callbacks=[stop], **SMALL)
    assert 5 <= found.steps < 60 * 23
    assert found.callbacks is not None
    assert found.callbacks[0]["asked_to_stop_at"] is not None
    assert stop.seen == found.callbacks[0]["state"]["seen"] > 0  # the object here has the state of rank 0's
    if strategy not in ("hogwild", "ssp"):
        alone = pt.run("digits", strategy, 2, steps=found.steps, **SMALL)
        assert found.parameters_sha256 == alone.parameters_sha256


def test_early_stopping_goes_on_after_a_resume(tmp_path: Path) -> None:
    """A run in two parts stops where the run in one part does: the best value is a part of the checkpoint."""
    text = "early_stop(metric='accuracy', patience=2, min_change=0.02)"
    options: dict[str, Any] = {"callbacks": [text], **SMALL}
    whole = pt.run("digits", "local_sgd(period=4)", 2, epochs=40, out=tmp_path / "whole", **options)
    assert whole.steps % 23 == 0
    assert 23 < whole.steps < 40 * 23
    first = pt.run("digits", "local_sgd(period=4)", 2, steps=whole.steps - 23, out=tmp_path / "parts", **options)
    assert first.callbacks is not None
    assert first.callbacks[0]["asked_to_stop_at"] is None
    second = pt.run("digits", "local_sgd(period=4)", 2, epochs=40, out=tmp_path / "parts", resume=True, **options)
    assert (second.steps, second.parameters_sha256) == (whole.steps, whole.parameters_sha256)
    assert whole.callbacks is not None
    assert second.callbacks is not None
    assert second.callbacks[0]["state"] == whole.callbacks[0]["state"]


def test_the_best_and_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    keep = pt.callbacks.keep(best=2, last=1, metric="accuracy")
    pt.run("digits", "sync_sgd", 2, epochs=6, out=tmp_path, callbacks=[keep], **SMALL)
    rows = [record for record in stream(tmp_path) if isinstance(record, TestRow)]
    best = sorted(rows, key=lambda row: (-(row.accuracy or 0.0), row.step))[:2]
    steps = {row.step for row in best} | {max(row.step for row in rows)}
    assert set(complete_in(tmp_path / "kept" / "checkpoint")) == steps
    assert pt.training.checkpoint_model(tmp_path / "kept")
    start = f"{tmp_path / 'kept'}@{best[0].step}"
    again = pt.run("digits", "sync_sgd", 2, steps=1, start_from=start, out=tmp_path / "next", **SMALL)
    assert again.started_from is not None
    assert again.started_from["step"] == best[0].step


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("local_sgd(period=4)", {"ema": 0.9}), ("gpipe(stages=2, micro_batches=2)", {})],
    ids=["the average that was scored", "stages put together"],
)
def test_the_best_models_and_each_fourth_one_are_exported(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also by a run in two parts: before the second one a kill has left out a file."""
    text, given = (
        "export(best=2, every=4, metric=accuracy, to='models/{step}-{accuracy:.4f}.safetensors')",
        SMALL | options,
    )
    pt.run("digits", strategy, 2, epochs=4, out=tmp_path, callbacks=text, **given)
    max((tmp_path / "models").iterdir(), key=lambda path: int(path.name.partition("-")[0])).unlink()
    pt.run("digits", strategy, 2, epochs=7, out=tmp_path, callbacks=text, resume=True, **given)
    rows = [*{record.step: record for record in stream(tmp_path) if isinstance(record, TestRow)}.values()]
    wanted = sorted(rows, key=lambda row: (-(row.accuracy or 0.0), row.step))[:2] + rows[3::4]
    files = {path.name: path for path in (tmp_path / "models").iterdir()}
    assert set(files) == {f"{row.step}-{row.accuracy:.4f}.safetensors" for row in wanted}
    job = pt.jobs.find("digits")
    for row in wanted:
        model = job.model()
        model.load_state_dict(safetensors.torch.load_file(files[f"{row.step}-{row.accuracy:.4f}.safetensors"]))
        scored = Evaluation(job, model, data_of(job, None)).score(tensors_of(model))
        assert scored.accuracy == pytest.approx(row.accuracy)


def test_elastic_workers_follow_the_request_of_the_first(tmp_path: Path) -> None:
    stop = StopAt(9)
    found = pt.run("digits", "sync_sgd", 2, epochs=60, min_workers=1, callbacks=[stop], out=tmp_path, **SMALL)
    assert 9 <= found.steps <= 12
    assert found.callbacks is not None


class Faults(pt.callbacks.Callback):
    """Notes faults."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_start(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen = []

    def on_fault(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append(facts.fault)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def killed_once(marker: Path) -> pt.Job:
    """Digits; the first worker that computes its sixth loss is killed there."""
    job, calls = pt.jobs.find("digits"), [0]
    loss: Any = job.loss

    def computed(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 6:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        found: Tensor = loss(output, target)
        return found

    return replace(job, loss=computed)


def test_a_killed_worker_is_told(tmp_path: Path) -> None:
    faults = Faults()
    job = killed_once(tmp_path / "killed")
    pt.run(job, "ssp", 2, epochs=2, callbacks=[faults], out=tmp_path / "run", **SMALL)
    words = r"worker-\d was killed by SIGKILL; started again"
    assert any(re.search(words, fault) for fault in faults.seen), faults.seen


class Scores(Faults):
    """Notes the steps of evaluations, too, and kills its process after a step, once."""

    def __init__(self, marker: Path, step: int) -> None:
        super().__init__()
        self._marker, self._step = marker, step

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> None:
        if facts.step == self._step and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_evaluation(self, facts: pt.callbacks.CallbackFacts) -> None:
        self.seen.append(str(facts.step))


def test_callbacks_of_a_killed_first_worker_go_on_in_another_one(tmp_path: Path) -> None:
    """The next first worker has the states of the last evaluation: each evaluation is noted once, before and after."""
    scores = Scores(tmp_path / "killed", step=7)
    options: dict[str, Any] = {"min_workers": 1, "max_workers": 2, "eval_every": 2, "steps": 12, **SMALL}
    stopping = pt.callbacks.early_stop("accuracy", patience=100)
    pt.run("digits", "sync_sgd", 2, callbacks=[scores, stopping], out=tmp_path / "run", **options)
    assert scores._marker.exists()
    noted = [int(each) for each in scores.seen if each.isdecimal()]
    assert noted == [2, 4, 6, 8, 10, 12]
    assert any("the group of workers has changed: " in each for each in scores.seen)
    rows = [record for record in stream(tmp_path / "run") if isinstance(record, TestRow)]
    assert stopping.state_dict()["best"] == max(row.accuracy or 0.0 for row in rows)


class Saves(pt.callbacks.Callback):
    """Asks for one checkpoint, and notes the complete ones."""

    def __init__(self) -> None:
        self.asked, self.seen = False, list[str]()

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> pt.callbacks.Control:
        asks, self.asked = not self.asked, True
        return pt.callbacks.Control(save=asks)

    def on_checkpoint(self, facts: pt.callbacks.CallbackFacts) -> None:
        assert facts.checkpoint is not None
        self.seen.append(facts.checkpoint)


def test_a_snapshot_of_a_server_is_saved_on_request(tmp_path: Path) -> None:
    saves = Saves()
    options: dict[str, Any] = {"epochs": 3, "checkpoint_every": 10_000, "out": tmp_path, "callbacks": [saves], **SMALL}
    pt.run("digits", "ssp", 2, **options)
    assert [Path(path).name for path in saves.seen] == ["snapshot-00000001-run.json", "snapshot-00000002-run.json"]


class Broken(pt.callbacks.Callback):
    """Raises at the first evaluation."""

    def on_evaluation(self, facts: pt.callbacks.CallbackFacts) -> None:
        raise KeyError("nothing")


@pytest.mark.parametrize("strategy", ["sync_sgd", "ssp"])
def test_a_callback_that_raises_ends_the_run_with_its_name(strategy: str) -> None:
    with pytest.raises((WorkerDied, pt.errors.JobFailed), match="callback Broken: on_evaluation raised KeyError"):
        pt.run("digits", strategy, 2, epochs=3, callbacks=[Broken()], **SMALL)


def test_other_interpreters_make_callbacks_from_their_text(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 30, "engine": "subprocess", **SMALL}
    found = pt.run("digits", "sync_sgd", 2, out=tmp_path, callbacks="time_budget(0.000001)", **options)
    assert found.steps < 30 * 23
    assert json.loads((tmp_path / "result.json").read_text())["callbacks"][0]["callback"] == "time_budget(1e-06)"
    with pytest.raises(pt.errors.Incompatible) as caught:
        pt.run("digits", "sync_sgd", 2, callbacks=[StopAt(3)], **options)
    assert caught.value.code == "PT2304"
