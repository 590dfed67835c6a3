"""Trackers beside real runs: the library reads back the rows of `metrics.jsonl`, at every end of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import polytempo as pt
from laws.test_observation import TESTS, job
from polytempo.engines.processes.worker import Result
from polytempo.report.status.records import ExchangeRow, Logged, RunFinished, StreamRecord, TestRow, TrainRow
from polytempo.report.status.stream import stream
from polytempo.trackers import TrackedRun, scalars, tracked
from polytempo.worlds import ProcessWorld
from process.crew import together
from waiting import soon

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

Points = dict[str, dict[int, float]]
"""Values by name and step."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked, "FINISH_S", 200.0)  # imports take long where other tests compute


def points(folder: Path) -> Points:
    """The numbers in the rows of a run."""
    found: Points = {}
    for record in stream(folder):
        for name, value in scalars(record).items():
            assert isinstance(record, TrainRow | TestRow | Logged | ExchangeRow)
            found.setdefault(name, {})[record.step] = value
    return found


def tensorboard(folder: Path) -> Points:
    """The numbers that TensorBoard finds."""
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    scalars = {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}
    return {tag.removeprefix("x-axes/"): {each.step: each.value for each in all_} for tag, all_ in scalars.items()}


def alike(found: Points, expected: Points) -> bool:
    """True if both have the same names and steps, and values that are equal in float32."""
    return found.keys() == expected.keys() and all(
        found[name] == pytest.approx(values, rel=1e-6) for name, values in expected.items()
    )


class Seen:
    """A tracker that keeps its records. `held`: `log` waits for it."""

    def __init__(self, held: threading.Event | None = None) -> None:
        self.points: Points = {}
        self.facts: list[TrackedRun] = []
        self.events: list[StreamRecord] = []
        self.ends: list[RunFinished] = []
        self.held = held

    def start(self, facts: TrackedRun) -> None:
        self.facts.append(facts)

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            self.points.setdefault(name, {})[step] = value
        if self.held is not None:
            self.held.wait(200)

    def event(self, event: StreamRecord) -> None:
        self.events.append(event)

    def finish(self, status: RunFinished) -> None:
        self.ends.append(status)


def test_tensorboard_has_the_rows_of_a_resumed_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The process of trackers and an object beside it; the second part goes on where the first one ended."""
    seen, given = Seen(), job(TESTS["plain"])
    for part, epochs in enumerate((1, 2)):
        pt.run(
            *(given, "local_sgd(period=4)", 2),
            epochs=epochs,
            out=tmp_path / "run",
            resume=part > 0,
            trackers=["tensorboard", seen],
        )
    expected = points(tmp_path / "run")
    assert max(expected["train/loss"]) == 18
    assert alike(tensorboard(tmp_path / "run"), expected)
    assert alike(seen.points, expected)
    assert [facts.resumed for facts in seen.facts] == [False, True]
    assert len({facts.identity for facts in seen.facts}) == 1
    assert seen.facts[0].settings["strategy"] == "local_sgd(period=4, route=native)"
    assert [end.state for end in seen.ends] == ["finished", "finished"]
    assert {type(event).__name__ for event in seen.events} == {"CheckpointSaved"}
    assert "note: tracker" not in capfd.readouterr().err


def test_each_run_of_a_comparison_is_tracked_and_workers_have_names(tmp_path: Path) -> None:
    seen = Seen()
    pt.compare("digits", ["sync_sgd", "downpour"], 2, epochs=1, out=tmp_path / "both", trackers=[seen])
    folders = [Path(facts.folder) for facts in seen.facts]
    assert [folder.name for folder in folders] == ["01-sync_sgd-route-native", *[folders[1].name]]
    assert "train/loss/worker-1" in seen.points
    assert seen.points["train/loss"] == points(folders[0])["train/loss"]
    assert seen.points["train/loss/worker-1"] == points(folders[1])["train/loss/worker-1"]


def test_simulations_are_tracked(tmp_path: Path) -> None:
    seen = Seen()
    pt.simulate(job(TESTS["plain"]), "ssp", 3, out=tmp_path / "run", trackers=[seen])
    assert seen.facts[0].world == "virtual"
    assert seen.points == points(tmp_path / "run")
    assert seen.ends == [RunFinished(state="finished")]


def test_a_run_does_not_wait_for_a_tracker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracked, "FINISH_S", 0.2)
    free = threading.Event()
    result = pt.run(job(None), "sync_sgd", 2, epochs=1, out=tmp_path / "run", trackers=[Seen(free)])
    free.set()
    assert result.steps == 9
    said = "note: tracker Seen has not finished within 0.2 s; the run goes on without it"
    assert capsys.readouterr().err.count(said) == 1


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    seen, calls = Seen(), list[int]()

    def wrong(output: Any, target: Any) -> Any:
        calls.append(1)
        if len(calls) > 8:  # not when the job is rehearsed
            raise RuntimeError("this loss cannot be computed")
        return torch.nn.functional.mse_loss(output, target)

    failing = pt.Job(**{**vars(job(None)), "loss": wrong})
    with pytest.raises(pt.errors.PolytempoError):
        pt.run(failing, "sync_sgd", 2, epochs=9, out=tmp_path / "run", trackers=[seen])
    [end] = seen.ends
    assert end.state == "failed"
    assert end.why


PROGRAM = """
import sys
import polytempo as pt
pt.run("digits", "local_sgd(period=8)", 2, epochs=100_000, out=sys.argv[1], trackers=["tensorboard"])
"""


def test_a_killed_launcher_leaves_a_readable_run(tmp_path: Path) -> None:
    """The tracker of the run reads the rest of the rows, and ends."""
    out = tmp_path / "run"
    launcher = subprocess.Popen([sys.executable, "-c", PROGRAM, str(out)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert soon(lambda: any((out / "tensorboard").glob("*")) and "train/loss" in tensorboard(out), 200)
        launcher.send_signal(signal.SIGKILL)
    finally:
        launcher.kill()
        launcher.wait(60)

    def ended() -> list[str]:
        found = EventAccumulator(str(out / "tensorboard"), size_guidance={"tensors": 0}).Reload()
        texts = found.Tensors("events") if "events" in found.Tags()["tensors"] else []
        return [each.tensor_proto.string_val[0].decode() for each in texts]

    assert soon(lambda: "failed: the launcher was killed" in ended(), 200)
    assert alike(tensorboard(out), points(out))
    assert json.loads((out / "trackers" / "tensorboard.json").read_text())["steps"]["train/None"] > 0


def without_exchanges(found: dict[str, Any]) -> dict[str, Any]:
    """Numbers without the records of exchanges, of which a loop makes one a second."""
    return {name: points for name, points in found.items() if not name.startswith("exchange/")}


def test_a_loop_shows_its_own_numbers_texts_and_pictures(tmp_path: Path) -> None:
    """Rank 0 tracks; the run ends with `detach`."""

    def work(world: ProcessWorld) -> Result:
        seen, model = Seen(), torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = pt.attach(model, optimizer, world=world, out=tmp_path / "loop", trackers=[seen, "tensorboard"])
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            handle.log(perplexity=2.5 * handle.step)
        handle.log_text("note", "a & b")
        handle.log_image("square", torch.zeros(2, 4, 3))
        handle.detach()
        return [seen.points, [type(event).__name__ for event in seen.events], [end.state for end in seen.ends]]

    tracked_by_rank_0, nothing = together(2, work, timeout_s=250)
    assert without_exchanges(tracked_by_rank_0[0]) == {"perplexity": {"1": 2.5, "2": 5.0, "3": 7.5}}
    assert "exchange/all_reduce/bytes" in tracked_by_rank_0[0]
    assert tracked_by_rank_0[1:] == [["LoggedText", "LoggedImage"], ["finished"]]
    assert nothing == [{}, [], []]
    assert without_exchanges(tensorboard(tmp_path / "loop")) == {"perplexity": {1: 2.5, 2: 5.0, 3: 7.5}}
    [picture] = EventAccumulator(str(tmp_path / "loop" / "tensorboard")).Reload().Images("square")
    assert (picture.height, picture.width) == (2, 4)


def test_trackers_of_a_loop_need_a_folder() -> None:
    model = torch.nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"give out=… as well, and log with handle\.log"):
        pt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), trackers="tensorboard")
