"""Trackers with large libraries: the rows of a run, read back by the library's own reader.

Each run is digits with two workers, resumed once: the tracked run is one run, and has the rows of `metrics.jsonl`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from matplotlib import image as pictures

import polytempo as pt
from polytempo.report.status.records import (
    LoggedImage,
    LoggedText,
    ProcessEvent,
    RunFinished,
    TestRow,
    TrainRow,
    record_of,
)
from polytempo.report.status.rows import read_metrics
from polytempo.trackers import TrackedRun, scalars, table, tracked

pytestmark = [pytest.mark.process, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # libraries' own
Points = dict[str, dict[int, float]]
"""Values by name and step."""
NAMES = ("train/loss", "test/accuracy", "test/loss", "train/samples_per_s")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tracked, "FINISH_S", 100.0)
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))


def resumed_run(out: Path, tracker: object) -> Points:
    """A run and its second part; the rows of both by name."""
    for part, epochs in enumerate((1, 2)):
        pt.run("digits", "local_sgd(period=8)", 2, epochs=epochs, out=out, resume=part > 0, trackers=tracker)
    return points(out)


def points(out: Path) -> Points:
    """The numbers in the rows of a run."""
    found: Points = {}
    for row in read_metrics(out):
        record = record_of(row)
        assert isinstance(record, TrainRow | TestRow)
        for name, value in scalars(record).items():
            found.setdefault(name, {})[record.step] = value
    return {name: found.get(name, {}) for name in NAMES}


def handed(tracker: pt.trackers.Tracker, folder: Path) -> None:
    """Events that a short run does not have: a picture, a text, a fault, a failed end."""
    pictures.imsave(folder / "square.png", np.linspace(0, 1, 6).reshape(2, 3))
    facts = TrackedRun(
        name="first",
        folder=str(folder),
        job="digits",
        strategy="ssp()",
        world="process",
        workers=2,
        settings={"lr": 0.5, "precision": "bf16", "tags": "paper,v2"},
        began_s=1.75e9,
        identity="abcd1234",
    )
    tracker.start(facts)
    tracker.log({"train/loss": 0.5}, 1)
    tracker.event(LoggedText(name="note", step=1, text="a & b <c>"))
    tracker.event(LoggedImage(name="square", step=1, path="square.png"))
    tracker.event(ProcessEvent(who="worker-1", how="was killed", at_s=1.0, then="started again"))
    tracker.finish(RunFinished(state="failed", why="a reason"))


# ------------------------------------------------------------------------------------------------------------- W&B


def wandb_records(folder: Path) -> list[Any]:
    """Records of all offline files, which W&B's program uploads: its messages, in blocks as LevelDB's log has them."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        content, at, parts = path.read_bytes(), 7, b""  # behind the file's own header
        while at + 7 <= len(content):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
            parts += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # a whole record, or the last part of one
                found.append(wandb_internal_pb2.Record.FromString(parts))
                parts = b""
    return found


def wandb_points(out: Path) -> tuple[set[str], Points]:
    records, found = wandb_records(out), dict[str, dict[int, float]]()
    for record in records:
        line = items(record.history.item) if record.HasField("history") else {}
        for name in line.keys() & set(NAMES):
            found.setdefault(name, {})[line["step"]] = line[name]
    return {record.run.run_id for record in records if record.HasField("run")}, found


def items(entries: Any) -> dict[str, Any]:
    return {"/".join(entry.nested_key) or entry.key: json.loads(entry.value_json) for entry in entries}


def test_wandb_offline(tmp_path: Path) -> None:
    out = tmp_path / "run"
    expected = resumed_run(out, pt.trackers.wandb(project="p", mode="offline"))
    records = wandb_records(out)
    [identity], found = wandb_points(out)
    assert identity == json.loads((out / "trackers" / "wandb.json").read_text())["identity"]
    config = next(items(record.run.config.update) for record in records if record.HasField("run"))
    assert config["strategy"] == "local_sgd(period=8, route=native)"
    assert found == expected
    axes = {record.metric.glob_name: record.metric.step_metric for record in records if record.HasField("metric")}
    assert axes.items() >= {"train/*": "step", "test/*": "step"}.items()


def test_wandb_has_texts_pictures_and_the_end(tmp_path: Path) -> None:
    handed(table.made(pt.trackers.wandb(mode="offline")), tmp_path)
    records = wandb_records(tmp_path)
    assert next(list(record.run.tags) for record in records if record.HasField("run")) == ["paper", "v2"]
    summary: dict[str, Any] = {}
    for record in records:
        if record.HasField("summary"):
            summary |= items(record.summary.update)
    assert summary["events"] == "1.0 s: worker-1 was killed; started again"
    assert (summary["faults"], summary["state"], summary["why"]) == (1, "failed", "a reason")
    lines = [items(record.history.item) for record in records if record.HasField("history")]
    kinds = {name: value.get("_type") for line in lines for name, value in line.items() if isinstance(value, Mapping)}
    assert kinds.items() >= {"note": "html-file", "square": "image-file"}.items() or "note" in str(lines)
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1]


# ---------------------------------------------------------------------------------------------------------- MLflow


def mlflow_points(uri: str, experiment: str = "e") -> tuple[set[str], Points]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    known = client.get_experiment_by_name(experiment)
    assert known is not None
    runs = [run.info.run_id for run in client.search_runs([known.experiment_id])]
    histories = {name: [e for run in runs for e in client.get_metric_history(run, name)] for name in NAMES}
    return set(runs), {name: {each.step: each.value for each in several} for name, several in histories.items()}


@pytest.mark.parametrize("store", ["sqlite", "file"])
def test_mlflow(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"sqlite:///{tmp_path}/m.db" if store == "sqlite" else f"file://{tmp_path}/mlruns"
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    expected = resumed_run(out, pt.trackers.mlflow(uri, "e"))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["strategy"] == "local_sgd(period=8, route=native)"
    assert mlflow_points(uri) == ({run.info.run_id}, expected)
    history = {name: client.get_metric_history(run.info.run_id, name) for name in NAMES}
    assert all(len(several) == len(expected[name]) for name, several in history.items())
    kept = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert kept >= {"report.html", "result.json"}
    [model] = client.list_artifacts(run.info.run_id, "model")
    logged = safetensors.torch.load_file(client.download_artifacts(run.info.run_id, model.path, str(tmp_path)))
    saved = pt.training.checkpoint_model(out)
    assert logged.keys() == saved.keys()
    assert all(torch.equal(logged[name], saved[name]) for name in saved)
    _, checkpoint = sorted(client.list_artifacts(run.info.run_id, "checkpoint"), key=lambda each: each.path)
    files = {Path(each.path).name for each in client.list_artifacts(run.info.run_id, checkpoint.path)}
    assert (
        files
        == {each.name for each in (out / checkpoint.path).iterdir()}
        == {"manifest.json", "rank-0.safetensors", "rank-1.safetensors"}
    )


def test_mlflow_has_texts_pictures_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/m.db"
    handed(table.made(pt.trackers.mlflow(uri)), tmp_path)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("polytempo")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert run.data.tags["polytempo.events"] == "1.0 s: worker-1 was killed; started again"
    assert run.data.tags["polytempo.why"] == "a reason"
    kept = {each.path for folder in ("texts", "images") for each in client.list_artifacts(run.info.run_id, folder)}
    assert kept == {"texts/note-1.txt", "images/square.png"}


# ----------------------------------------------------------------------------------------------------------- Comet


def comet_messages(folder: Path) -> list[Any]:
    """The messages in the files that `comet upload` takes, in the order of their writing."""
    return [json.loads(line) for file in comet_files(folder) for line in file.read("messages.json").splitlines()]


def comet_files(folder: Path) -> list[zipfile.ZipFile]:
    """The complete files: a file without content is left by a killed process, which had begun it."""
    files = sorted(filter(zipfile.is_zipfile, folder.glob("*.zip")), key=lambda file: file.stat().st_mtime)
    return [opened for file in files if "messages.json" in (opened := zipfile.ZipFile(file)).namelist()]


def comet_points(out: Path) -> tuple[set[str], Points]:
    found: Points = {name: {} for name in NAMES}
    for each in comet_messages(out / "comet"):
        if each["type"] == "metric_msg" and (metric := each["payload"]["metric"])["metricName"] in found:
            found[metric["metricName"]][metric["step"]] = metric["metricValue"]
    return {json.loads(file.read("experiment.json"))["offline_id"] for file in comet_files(out / "comet")}, found


def test_comet_offline(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    expected = resumed_run(tmp_path / "run", pt.trackers.comet("p", mode="offline"))
    messages = comet_messages(tmp_path / "run" / "comet")
    assert comet_points(tmp_path / "run")[1] == expected
    parameters = [each["payload"]["param"] for each in messages if each["type"] == "parameter_msg"]
    assert {each["paramName"]: each["paramValue"] for each in parameters}["strategy"].startswith("local_sgd(period=8")
    others = [each["payload"] for each in messages if each["type"] == "log_other"]
    assert [each["value"] for each in others if each["key"] == "state"] == ["finished", "finished"]


def test_comet_has_pictures_texts_and_faults(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    handed(table.made(pt.trackers.comet("p", mode="offline")), tmp_path)
    messages = comet_messages(tmp_path / "comet")
    others = {each["payload"]["key"]: each["payload"]["value"] for each in messages if each["type"] == "log_other"}
    assert (others["state"], others["why"], others["faults"]) == ("failed", "a reason", 1)
    with zipfile.ZipFile(next((tmp_path / "comet").glob("*.zip"))) as file:
        held = [file.read(name) for name in file.namelist()]
    assert (tmp_path / "square.png").read_bytes() in held
    assert b"a & b <c>" in held


# --------------------------------------------------------------------------------------------------------- Trackio


def trackio_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A project of its own in Trackio's folder, which the library reads when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    from trackio.utils import TRACKIO_DIR

    monkeypatch.setenv("TRACKIO_DIR", str(TRACKIO_DIR))
    return folder.name


def trackio_points(project: str) -> tuple[set[str], Points]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = trackio.Api().runs(project)
    lines = [line for run in runs for line in SQLiteStorage.get_logs(project, run.name, run_id=run.id)]
    return {run.id for run in runs}, {
        name: {line["step"]: line[name] for line in lines if name in line} for name in NAMES
    }


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = trackio_project(tmp_path, monkeypatch)
    import trackio

    expected = resumed_run(tmp_path / "run", pt.trackers.trackio(project))
    [run] = trackio.Api().runs(project)
    assert run.config is not None
    assert run.config["strategy"] == "local_sgd(period=8, route=native)"
    assert trackio_points(project) == ({run.id}, expected)
