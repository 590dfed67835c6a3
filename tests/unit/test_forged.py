"""Checkpoints, snapshots and records with right hashes and nonsensical content are refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import polytempo as pt
from polytempo.cli.main import app
from polytempo.cli.run.top import status_in
from polytempo.replay.records import read_facts, read_run
from polytempo.report.runs import read_events
from polytempo.report.status.live_status import LiveStatus, ProcessStatus, status_of_result
from polytempo.report.status.live_view import view
from polytempo.report.status.records import ProcessEvent
from polytempo.runs.served import run_snapshot
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.record import RecordError
from polytempo.server.snapshots import snapshot
from polytempo.server.snapshots.snapshot import SnapshotError
from polytempo.spec.text.plain_text import plain_text
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, commit, read_manifest, read_part, write_part
from polytempo.training.checkpoint.checkpoint_folders import CheckpointError

DEEP = "[" * 100_000 + "]" * 100_000


def saved(root: Path) -> Path:
    return commit(root, 1, [write_part(root, 1, 0, CheckpointPart({"weight": torch.ones(3)}, {"epoch": 1}))], {})


def forge(folder: Path, **entries: Any) -> None:
    """Another manifest, with the right hashes of everything."""
    file = folder / "rank-0.safetensors"
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    part = {"name": file.name, "num_bytes": file.stat().st_size, "sha256": sha256, "coordinates": {"data": 0}}
    body: dict[str, Any] = {"format": "polytempo-checkpoint", "version": 2, "step": 1, "mesh": {"data": 1}}
    body |= {"parts": [part], "about": {}, **entries}
    own = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    (folder / "manifest.json").write_bytes(json.dumps({**body, "sha256": own}, indent=1).encode() + b"\n")


MANIFESTS: dict[str, dict[str, Any]] = {
    "a step in letters": {"step": "x"},
    "a step of truth": {"step": True},
    "a step before the first": {"step": -5},
    "a step beyond 64 bits": {"step": 2**63},
    "a negative size": {"parts": [{"name": "rank-0.safetensors", "num_bytes": -1, "sha256": ""}]},
    "a list as step": {"step": []},
    "parts that are numbers": {"parts": [1, 2]},
    "parts that are a billion": {"parts": 10**9},
    "no part": {"parts": []},
    "a size in letters": {"parts": [{"name": "rank-0.safetensors", "num_bytes": "x", "sha256": ""}]},
    "no hash": {"parts": [{"name": "rank-0.safetensors", "num_bytes": 1, "sha256": None}]},
    "another key": {"parts": [{"name": "rank-0.safetensors", "size": 1}]},
    "no mesh": {"mesh": None},
    "a mesh of letters": {"mesh": {"data": "x"}},
    "a mesh of another size": {"mesh": {"data": 2}},
    "an axis of no length": {"mesh": {"data": 0}},
    "a mesh that is not that of the coordinates": {"mesh": {"model": 1}},
    "a version of truth": {"version": True},
    "notes that are none": {"about": [1]},
    "notes nested deeply": {"about": {"x": json.loads("[" * 900 + "]" * 900)}},
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_forged_manifest_is_refused(tmp_path: Path, what: str) -> None:
    folder = saved(tmp_path)
    forge(folder, **MANIFESTS[what])
    with pytest.raises(CheckpointError, match=r"manifest\.json is .*; there is no earlier checkpoint; delete"):
        read_manifest(folder)


def test_what_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "manifest.json").write_text(DEEP)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged \(RecursionError"):
        read_manifest(folder)


def overwrite(content: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(content) and None


def scalars(text: str | None) -> Callable[[Path], None]:
    metadata = None if text is None else {"scalars": text}
    return lambda file: save_file({"weight": torch.ones(3)}, file, metadata=metadata)


PARTS: dict[str, Callable[[Path], None]] = {
    "nothing": overwrite(b""),
    "noise": overwrite(bytes(range(256)) * 8),
    "a header of 2^63 bytes": overwrite(b"\xff" * 7 + b"\x7f" + b"{}"),
    "no metadata": scalars(None),
    "no JSON": scalars("{"),
    "a list": scalars("[1]"),
    "a number": scalars("1"),
    "a scalar that is a list": scalars('{"epoch": [1]}'),
    "JSON nested deeply": scalars(DEEP),
}


@pytest.mark.parametrize("what", PARTS)
def test_a_forged_part_is_refused(tmp_path: Path, what: str) -> None:
    folder = saved(tmp_path)
    PARTS[what](folder / "rank-0.safetensors")
    forge(folder)
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors is not a rank's file .*; there is no"):
        read_part(folder, 0)


# ---- a checkpoint of something else


def fit(out: Path, **options: Any) -> pt.Result:
    samples = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    job = pt.Job(
        model=lambda: nn.Linear(2, 1),
        data=lambda folder: pt.Data(samples),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
        batch_size=4,
        name="line",
    )
    return pt.Trainer(job, pt.strategies.sync_sgd(), out=out, **options).fit()


def without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def harm(tensors: dict[str, Any], scalars: dict[str, Any]) -> None:
        tensors.pop(name, None)
        scalars.pop(name, None)

    return harm


def with_scalar(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda tensors, scalars: scalars.update({name: value})


CONTENTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "no model": without("model/weight"),
    "another shape": lambda tensors, scalars: tensors.update({"model/weight": torch.ones(7)}),
    "no optimizer": without("optimizer"),
    "an optimizer of letters": with_scalar("optimizer", '{"groups": "x", "numbers": 3}'),
    "an optimizer nested deeply": with_scalar("optimizer", DEEP),
    "no position": without("shard"),
    "a position of letters": with_scalar("shard", '{"epoch": "x"}'),
    "no time": without("seconds"),
    "time in letters": with_scalar("seconds", "soon"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    fit(out, epochs=1)
    return out


@pytest.mark.parametrize("what", CONTENTS)
def test_a_checkpoint_that_does_not_fit_is_refused(run: Path, tmp_path: Path, what: str) -> None:
    (folder,) = (run / "checkpoint").iterdir()
    part, about = read_part(folder, 0), read_manifest(folder).about
    CONTENTS[what](part.tensors, part.scalars)
    root = tmp_path / "checkpoint"
    commit(root, 2, [write_part(root, 2, 0, part)], about)
    with pytest.raises(CheckpointError, match=r"step-00000002 does not fit this run \(\w+: "):
        fit(tmp_path, epochs=2, resume=True)


# ---- snapshots and records of a parameter server


def test_a_snapshot_that_holds_no_shard_is_refused(tmp_path: Path) -> None:
    scheduler = '{"version": "x"}'
    run_snapshot.write_run_snapshot(tmp_path, run_snapshot.RunSnapshot(1, 0, 4, {"shards": 1}, scheduler))
    for tensors in ([], [torch.ones(3)], [torch.ones(2, 2)]):
        snapshot.write(tmp_path, 1, 0, b"no state of a shard", tensors)
        with pytest.raises(SnapshotError, match=r"snapshot-00000001-shard-0\.safetensors was not written by a shard"):
            run_snapshot.resumed(tmp_path, 1, {})


@pytest.mark.parametrize(
    "entries", [{"number": 2}, {"step": -5}, {"step": 2**63}, {"generation": -1}, {"seconds": -1.0}], ids=str
)
def test_a_forged_part_of_a_launcher_is_refused(tmp_path: Path, entries: dict[str, Any]) -> None:
    run_snapshot.write_run_snapshot(tmp_path, run_snapshot.RunSnapshot(1, 0, 4, {}, ""))
    path = run_snapshot.run_snapshot_path(tmp_path, 1)
    document = json.loads(path.read_text())
    body = json.dumps(document["standing"] | entries).encode()
    document |= {"sha256": hashlib.sha256(body).hexdigest(), "standing": msgspec.Raw(body)}
    path.write_bytes(msgspec.json.encode(document))
    with pytest.raises(SnapshotError):
        run_snapshot.read_run_snapshot(tmp_path, 1)


# ---- the files of a finished run, and the run's facts

ODD: list[Any] = [None, -1, 2**70, 1e308, "x", "\x1b[2J", [], {}, [{}], {"a": 1}]


def asked(*words: str) -> None:
    """The command ends well or with a refusal, and nothing that it prints steers a terminal."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code in (0, 2), done.output
    assert not any(sign in done.output for sign in "\x1b\x9b\x07\u202e"), done.output


@pytest.mark.parametrize("file", ["live.json", "result.json"])
def test_forged_entries_of_a_finished_run_are_shown_or_refused(run: Path, tmp_path: Path, file: str) -> None:
    good = json.loads((run / "result.json").read_text())
    if file == "live.json":
        good = msgspec.to_builtins(status_of_result(good, [])) | {"launcher_pid": 7}
    refused = 0
    for name, odd in product(good, ODD):
        (tmp_path / file).write_text(json.dumps(good | {name: odd}))
        try:
            status = status_in(tmp_path)
        except ValueError:
            refused += 1
            continue
        Console(file=StringIO()).print(view(status, now_s=9.0))
    assert refused > len(ODD)


def test_what_steers_a_terminal_is_shown_as_text(tmp_path: Path) -> None:
    text = "\x1b]0;owned\x07\x9b2J[/red]\u202e\ud800"
    process = ProcessStatus(text, "worker", text, "running")
    status = LiveStatus(
        *(1, text, text, "process", 1, "failed", 2.0, 1.0, text, 7, text),
        processes=(process,),
        events=(ProcessEvent(text, text, 1.0, text),),
    )
    (tmp_path / "live.json").write_text(json.dumps(msgspec.to_builtins(status)))
    asked("top", str(tmp_path), "--once")
    asked("top", str(tmp_path), "--records")
    asked("top", str(tmp_path) + text)
    assert plain_text("a\tb\nü 語 \x1b[2J\ud800") == "a\tb\nü 語 \\x1b[2J\\ud800"


@pytest.mark.parametrize(
    "entries",
    [
        {"steps": -5},
        {"workers": "x"},
        {"workers": 2**40},
        {"precision": {}},
        {"seed": 2**70},
        {"job": "\x1b[2J"},
        {"samples": None},
    ],
    ids=str,
)
def test_a_forged_result_is_not_simulated(run: Path, tmp_path: Path, entries: dict[str, Any]) -> None:
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    result = json.loads((run / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(result | entries))
    done = CliRunner().invoke(app, ["validate", str(tmp_path), "--cluster", "ethernet"])
    assert done.exit_code == 2, done.output
    assert "\x1b" not in done.output


@pytest.mark.parametrize(
    "entries", [{"pid": "x"}, {"ts": None}, {"dur": 1e300}, {"args": []}, {"args": {"step": -1}}], ids=str
)
def test_a_forged_trace_is_refused(run: Path, tmp_path: Path, entries: dict[str, Any]) -> None:
    trace = json.loads((run / "trace.json").read_text())
    next(line for line in trace["traceEvents"] if line["ph"] == "X").update(entries)
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    with pytest.raises(ValueError, match=r"trace\.json, "):
        read_events(tmp_path / "trace.json")


def facts(**entries: Any) -> dict[str, Any]:
    given = {"format": "polytempo-run", "version": 1, "job": "j", "origin": None, "origin_sha256": None}
    given |= {"strategy": "downpour()", "workers": 2, "shards": 1, "options": {}, "native": False, "threads": 1}
    return given | {"bits": {}} | entries


@pytest.mark.parametrize(
    "content",
    [facts(shards=10**9), facts(shards=0), facts(workers=-1), facts(shards="x"), {}, json.loads("[" * 900 + "]" * 900)],
    ids=["a billion shards", "no shard", "workers", "letters", "nothing", "deep"],
)
def test_a_forged_record_is_refused(tmp_path: Path, content: Any) -> None:
    folder = tmp_path / "record" / "0000"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"run\.json (is damaged|speaks of)"):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    ("machine", "end"), [("shard x", None), ("shard 7", None), ("shard 0", "[]"), ("shard 0", "{")]
)
def test_a_forged_history_is_refused(tmp_path: Path, machine: str, end: str | None) -> None:
    folder = tmp_path / "record" / "0000"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(facts()))
    header = {"format": "polytempo-record", "version": 2, "machine": "coordinator", "node": 0, "first": 1}
    (folder / "coordinator.jsonl").write_text(json.dumps(header) + "\n")
    (folder / "shard-0-node-2.jsonl").write_text(json.dumps(header | {"machine": machine}) + "\n")
    if end is not None:
        (folder / "end.json").write_text(end)
    with pytest.raises((ValueError, RecordError), match=r"jsonl is the record of|end\.json "):
        read_run(tmp_path)


def test_a_dealer_is_not_sent_to_deal_a_billion_batches_again() -> None:

    state = msgspec.msgpack.decode(BatchScheduler(4, 8, "freely", 1).dump())
    with pytest.raises(ValueError, match="batches before the last dealt one are not done"):
        BatchScheduler(4, 8, "freely", 1).load(msgspec.msgpack.encode(state), [[(10**12, 10**12)]])
