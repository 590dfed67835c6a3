"""The stream of a run: typed records from the files of its folder, also of old ones, at a URL, and while it goes on."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import polytempo as pt
from object_store import bucket
from polytempo.cli.main import app
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.jobs import find
from polytempo.report.status.live_status import VERSION, GroupStatus, LiveStatus, ProcessEvent, write_status
from polytempo.report.status.metrics import MetricsWriter, read_metrics
from polytempo.report.status.stream import (
    RunFinished,
    RunStarted,
    RunStream,
    StreamRecord,
    TestRow,
    TrainRow,
    follow,
    line_of,
    stream,
)

OLD_METRICS = b"""\
{"kind": "train", "step": 8, "epoch": 0.33, "samples": 480, "seconds": 0.5, "loss": null, "samples_per_s": 29235.4, \
"idle_share": 0.25, "staleness": 0.0, "noise_scale": 41.5, "worker": 0}
{"kind": "train", "step": 9, "epoch": 0.38, "samples": 544, "seconds": 0.7, "loss": 1.5, "samples_per_s": 15237.2, \
"idle_share": 0.5, "staleness": null, "worker": 1}
{"kind": "test", "step": 12, "epoch": 0.53, "samples": 768, "seconds": 0.8, "loss": 1.065, "accuracy": 0.64}
{"kind": "train", "step": 13, "lo"""
OLD_STATUS = b"""\
{"version":1,"job":"digits","strategy":"downpour(push_every=5)","world":"process","workers":2,"state":"failed",\
"written_s":1795817913.5,"began_s":1795817912.5,"launcher_host":"n0","launcher_pid":17,"why":"worker-1 died",\
"steps":12,"epochs":null,"train":{"kind":"train","step":9,"loss":1.5},"test":null,"processes":[],"num_events":1,\
"events":[{"who":"worker-1","how":"was killed by SIGKILL","at_s":0.75,"then":"started again"}],\
"group":{"generation":2,"step":5,"workers":1}}"""
"""The files of a run before there was a stream: events have no kind, and there is no list of groups."""
OLD_RECORDS: list[StreamRecord] = [
    RunStarted(
        job="digits",
        strategy="downpour(push_every=5)",
        world="process",
        workers=2,
        began_s=1795817912.5,
        steps=12,
    ),
    TrainRow(
        step=8,
        loss=None,
        epoch=0.33,
        samples=480,
        seconds=0.5,
        samples_per_s=29235.4,
        worker=0,
        idle_share=0.25,
        staleness=0.0,
        more={"noise_scale": 41.5},
    ),
    TrainRow(
        step=9,
        loss=1.5,
        epoch=0.38,
        samples=544,
        seconds=0.7,
        samples_per_s=15237.2,
        worker=1,
        idle_share=0.5,
    ),
    TestRow(step=12, loss=1.065, epoch=0.53, samples=768, seconds=0.8, accuracy=0.64),
    ProcessEvent("worker-1", "was killed by SIGKILL", 0.75, "started again"),
    GroupStatus(2, 5, 1),
    RunFinished(state="failed", why="worker-1 died"),
]


@pytest.mark.parametrize("at_url", [False, True])
def test_an_old_folder_is_read_also_at_a_url(at_url: bool, tmp_path: Path) -> None:
    run: Place = UrlPath(bucket(tmp_path)) if at_url else tmp_path
    for name, content in (("metrics.jsonl", OLD_METRICS), ("live.json", OLD_STATUS)):
        path = run / name
        path.write(content) if isinstance(path, UrlPath) else path.write_bytes(content)
    assert stream(run) == stream(str(run)) == list(follow(run)) == OLD_RECORDS


def filled(row: dict[str, Any]) -> dict[str, Any]:
    """The row without its nulls."""
    return {name: value for name, value in row.items() if value is not None}


@pytest.mark.parametrize("world", ["process", "virtual"])
def test_a_run_is_its_facts_its_rows_and_its_end_and_reading_leaves_it_alone(world: str, tmp_path: Path) -> None:
    job = find("digits")
    if world == "process":
        pt.run(job, pt.strategies.sync_sgd(), 2, steps=4, out=tmp_path)
    else:
        pt.simulate(job, pt.strategies.async_sgd(), 2, steps=4, out=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    start, *rows, end = stream(tmp_path)
    assert isinstance(start, RunStarted)
    assert (start.version, start.job, start.world, start.workers) == (1, "digits", world, 2)
    assert [json.loads(line_of(row)) for row in rows] == list(map(filled, read_metrics(tmp_path / "metrics.jsonl")))
    assert {type(row) for row in rows} == {TrainRow, TestRow}
    assert end == RunFinished(state="finished")
    done = CliRunner().invoke(app, ["top", str(tmp_path), "--records"])
    assert done.stdout.splitlines() == [line_of(record) for record in (start, *rows, end)]
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def status(state: Any = "running", **facts: Any) -> LiveStatus:
    """The status of a run whose launcher is this process."""
    begin = LiveStatus(VERSION, "job", "s()", "process", 2, state, 2.0, 1.0, socket.gethostname(), os.getpid())
    return msgspec.structs.replace(begin, **facts)


def write(folder: Path, state: Any = "running", events: tuple[ProcessEvent, ...] = (), **facts: Any) -> None:
    """Replace the status; of its events the file holds the last two."""
    write_status(folder, status(state, num_events=len(events), events=events[-2:], **facts))


def test_each_record_is_given_once_while_the_run_goes_on(tmp_path: Path) -> None:
    first, second = GroupStatus(1, 0, 3), GroupStatus(2, 7, 2)
    events = [ProcessEvent(f"member-{number}", "left", float(number), "2 workers go on") for number in range(5)]
    write(tmp_path)
    records = follow(tmp_path, every_s=0.0)
    assert next(records) == RunStarted(job="job", strategy="s()", world="process", workers=2, began_s=1.0)
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write({"kind": "train", "step": 1, "loss": 2.0})
        write(tmp_path, events=tuple(events[:1]), groups=(first,))
        assert [next(records) for _ in range(3)] == [TrainRow(step=1, loss=2.0), events[0], first]
        metrics.write({"kind": "train", "step": 2, "loss": 1.0})
        unknown = msgspec.structs.replace(events[2], then="")
        write(tmp_path, events=(*events[:2], unknown), groups=(first, second))
        assert [next(records) for _ in range(3)] == [TrainRow(step=2, loss=1.0), events[1], second]
        metrics.write({"kind": "test", "step": 2, "loss": 0.5, "accuracy": 1.0})
        write(tmp_path, "finished", events=tuple(events[:4]), groups=(first, second))
    end = [TestRow(step=2, loss=0.5, accuracy=1.0), *events[2:4], RunFinished(state="finished")]
    assert list(records) == end


def test_of_more_events_than_the_status_holds_the_last_are_given(tmp_path: Path) -> None:
    events = tuple(ProcessEvent("worker-0", "died", float(number), "started again") for number in range(5))
    write(tmp_path, events=events)
    reader = RunStream(tmp_path)
    assert reader.look()[1:] == list(events[3:])
    assert reader.look() == []


def test_an_event_without_a_consequence_is_given_when_the_run_has_ended(tmp_path: Path) -> None:
    lost = ProcessEvent("member-1", "was killed by SIGKILL", 3.0, "")
    write(tmp_path, events=(lost,))
    reader = RunStream(tmp_path)
    assert len(reader.look()) == 1
    write(tmp_path, "failed", events=(lost,), why="too few workers")
    assert reader.look() == [lost, RunFinished(state="failed", why="too few workers")]
    assert reader.ended
    assert reader.look() == []


def test_a_stream_whose_launcher_is_gone_ends_without_an_end(tmp_path: Path) -> None:
    write(tmp_path, launcher_pid=2**22 + 1)
    assert [type(record) for record in follow(tmp_path)] == [RunStarted]


def test_a_run_without_a_launcher_has_rows_first(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write({"kind": "train", "step": 1, "loss": 2.0})
    reader = RunStream(tmp_path)
    assert reader.look() == [TrainRow(step=1, loss=2.0)]
    (tmp_path / "result.json").write_text(json.dumps({"world": "process", "strategy": "s()", "workers": 2}))
    assert [type(record) for record in reader.look()] == [RunStarted, RunFinished]


def test_a_resumed_run_gives_the_rows_that_it_keeps_again(tmp_path: Path) -> None:
    write(tmp_path)
    path, steps = tmp_path / "metrics.jsonl", []
    reader = RunStream(tmp_path)
    for resumed_at, own in ((None, (1, 2, 3)), (2, (3,))):
        with MetricsWriter(path, resumed_at=resumed_at) as metrics:
            for step in own:
                metrics.write({"kind": "train", "step": step, "loss": 1.0})
        steps.append([record.step for record in reader.look() if isinstance(record, TrainRow)])
    assert steps == [[1, 2, 3], [1, 2, 3]]


def test_kinds_of_later_versions_are_left_out_and_further_entries_kept(tmp_path: Path) -> None:
    write(tmp_path)
    row = {"kind": "train", "step": 1, "loss": 2.0, "perplexity": 7.4, "more": [1]}
    (tmp_path / "metrics.jsonl").write_text('{"kind": "picture", "step": 1}\n' + json.dumps(row) + "\n")
    _, record = stream(tmp_path)
    assert record == TrainRow(step=1, loss=2.0, more={"perplexity": 7.4, "more": [1]})
    assert json.loads(line_of(record)) == row


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", r"metrics\.jsonl: .*; remove that line"),
        ("[]", "not a JSON object"),
        ('{"step": 1}', "it has no kind"),
        ('{"kind": "train", "loss": 1.0}', "missing required field `step`"),
        ('{"kind": "train", "step": 1, "loss": NaN}', "loss is 'nan', and not a number"),
        ('{"kind": "train", "step": 1, "loss": 1.0, "worker": -1}', "worker"),
    ],
)
def test_a_line_that_no_run_has_written_is_one_error(tmp_path: Path, line: str, match: str) -> None:
    write(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=match):
        stream(tmp_path)


def test_a_folder_without_a_run_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl, live\.json or result\.json"):
        stream(tmp_path)
    for words in (["--records"], ["--records", "--json"]):
        done = CliRunner().invoke(app, ["top", str(tmp_path), *words])
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
