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
from polytempo.report.status.event_log import EventLog, logged
from polytempo.report.status.live_status import VERSION, LiveStatus, write_status
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.records import (
    CheckpointSaved,
    Diagnosis,
    ExchangedOp,
    ExchangeRow,
    GroupStatus,
    Logged,
    LoggedImage,
    LoggedText,
    ProcessEvent,
    RunFinished,
    RunStarted,
    StreamRecord,
    TestRow,
    TrainRow,
    line_of,
    record_of,
    records_in,
)
from polytempo.report.status.rows import read_rows
from polytempo.report.status.stream import RunStream, follow, status_in, stream
from polytempo.runs.frame.live_run import LiveRun, RunEvents, ShownRun

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
        host="n0",
        pid=17,
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
    assert (start.host, start.pid, start.resumed) == (socket.gethostname(), os.getpid(), None)
    assert [json.loads(line_of(row)) for row in rows] == list(map(filled, read_rows(tmp_path)))
    assert {type(row) for row in rows} >= {TrainRow, TestRow}
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
    here: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    assert next(records) == RunStarted(job="job", strategy="s()", world="process", workers=2, began_s=1.0, **here)
    with MetricsWriter(tmp_path) as metrics:
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
    with MetricsWriter(tmp_path) as metrics:
        metrics.write({"kind": "train", "step": 1, "loss": 2.0})
    reader = RunStream(tmp_path)
    assert reader.look() == [TrainRow(step=1, loss=2.0)]
    (tmp_path / "result.json").write_text(json.dumps({"world": "process", "strategy": "s()", "workers": 2}))
    assert [type(record) for record in reader.look()] == [RunStarted, RunFinished]


def test_a_resumed_run_gives_the_rows_that_it_keeps_again(tmp_path: Path) -> None:
    write(tmp_path)
    steps = []
    reader = RunStream(tmp_path)
    for resumed_at, own in ((None, (1, 2, 3)), (2, (3,))):
        with MetricsWriter(tmp_path, resumed_at=resumed_at) as metrics:
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
        ('{"kind": "train", "step": 1, "loss": NaN}', "NaN is not a number of JSON"),
        ('{"kind": "train", "step": 1, "loss": 1.0, "worker": -1}', "worker"),
    ],
)
def test_a_line_that_no_run_has_written_is_one_error(tmp_path: Path, line: str, match: str) -> None:
    write(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=match):
        stream(tmp_path)


def test_a_folder_without_a_run_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no events\.jsonl, metrics\.jsonl, live\.json or result\.json"):
        stream(tmp_path)
    for words in (["--records"], ["--records", "--json"]):
        done = CliRunner().invoke(app, ["top", str(tmp_path), *words])
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


START = RunStarted(job="job", strategy="s()", world="process", workers=2)
ROW = {"kind": "train", "step": 1, "loss": 2.0}
KINDS: list[StreamRecord] = [
    CheckpointSaved(step=7, at_s=1.5, path="checkpoint/step-7"),
    ExchangeRow(step=7, since_step=3, waited_s=0.25, ops={"send": ExchangedOp(4, 480, 0.5)}),
    Logged(step=3, values={"perplexity": 7.4, "<b>": -1.0}, worker=1),
    LoggedText(name="sample", step=3, text="once\nupon"),
    LoggedImage(name="digit", step=3, path="images/digit-3.png"),
    Diagnosis(at_s=2.0, about="slow rank", who="rank-3", rank=3, text="rank 3 is slow", values={"slower": 0.31}),
    ProcessEvent("worker-1", "was killed by SIGKILL", 0.75, "started again"),
    GroupStatus(2, 5, 1),
]


@pytest.mark.parametrize("at_url", [False, True])
def test_each_kind_comes_back_from_the_log(at_url: bool, tmp_path: Path) -> None:
    run: Place = UrlPath(bucket(tmp_path)) if at_url else tmp_path
    with logged(run, START) as events:
        for record in KINDS:
            events.append(record)
    start, *records, end = stream(run)
    assert isinstance(start, RunStarted)
    assert msgspec.structs.replace(start, began_s=None, host=None, pid=None) == START
    assert (records, end) == (KINDS, RunFinished(state="finished"))
    assert [record_of(json.loads(line_of(record))) for record in KINDS] == KINDS


@pytest.mark.parametrize(
    "record",
    [
        Logged(step=1, values={"x": float("nan")}),
        Logged(step=1, values={"x": float("inf")}),
        Logged(step=-1, values={}),
        LoggedImage(name="x", step=1, path="../../secret.png"),
        LoggedImage(name="x", step=1, path="/etc/secret.png"),
        LoggedText(name="x" * 201, step=1, text=""),
    ],
    ids=["nan", "infinite", "step", "above", "absolute", "long"],
)
def test_a_record_that_readers_refuse_is_not_written(record: StreamRecord, tmp_path: Path) -> None:
    with EventLog(tmp_path) as events, pytest.raises(ValueError, match=r"Expected|not a number|finite|>="):
        events.append(record)
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def part(folder: Path, *, resume: bool, error: BaseException | None = None) -> None:
    """A part of a run that ends with `error`, with a fault and a row."""
    history = RunEvents()
    with LiveRun(folder, ShownRun("job", "s()", 2, resume=resume), history) as live:
        with MetricsWriter(folder, resumed_at=1 if resume else None) as metrics:
            metrics.write(ROW)
        history.add("worker-0", "died", 1.0, "started again")
        if error is not None:
            live.__exit__(type(error), error, None)


def test_a_resumed_run_appends_another_start_and_a_new_one_begins_a_new_log(tmp_path: Path) -> None:
    """1. A run is preempted. 2. It is resumed and ends. 3. Another run begins in its folder."""
    fault = ProcessEvent("worker-0", "died", 1.0, "started again")
    reader = RunStream(tmp_path)
    part(tmp_path, resume=False, error=OSError("no more disk\nat all"))
    first = reader.look()
    failed = RunFinished(state="failed", why="no more disk")
    assert first[1:] == [TrainRow(step=1, loss=2.0), fault, failed]
    assert reader.ended
    (tmp_path / "checkpoint").mkdir()
    part(tmp_path, resume=True)
    start, old_fault, end, again, *rows, new_fault, finish = stream(tmp_path)
    assert isinstance(again, RunStarted)
    assert (start, old_fault, end, again.resumed) == (first[0], fault, failed, True)
    assert (rows, new_fault, finish) == ([TrainRow(step=1, loss=2.0)] * 2, fault, RunFinished(state="finished"))
    part(tmp_path, resume=False)
    kinds = [type(record).__name__ for record in stream(tmp_path)]
    assert kinds == ["RunStarted", "TrainRow", "ProcessEvent", "RunFinished"]


def test_a_line_that_a_killed_launcher_cut_short_is_removed_by_the_next_one(tmp_path: Path) -> None:
    with EventLog(tmp_path) as events:
        events.append(msgspec.structs.replace(START, host=socket.gethostname(), pid=2**22 + 1))
    path = tmp_path / "events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "fin')
    reader = RunStream(tmp_path)
    assert [type(record) for record in reader.look()] == [RunStarted]
    assert reader.ended, "its launcher is gone"
    with EventLog(tmp_path) as events:
        events.append(KINDS[0])
    assert path.read_bytes() == whole + line_of(KINDS[0]).encode() + b"\n"


def test_a_log_that_cannot_be_written_is_one_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with EventLog(tmp_path) as events:
        events.append(KINDS[0])
        events.append(KINDS[1])
    assert capsys.readouterr().err.count("has no records") == 1


def test_a_run_without_a_launcher_has_a_status_while_it_goes_on_and_without_a_result(tmp_path: Path) -> None:
    """1. It goes on. 2. It has ended without a result, as a loop does. 3. A result tells more."""
    with logged(tmp_path, START):
        with MetricsWriter(tmp_path) as metrics:
            metrics.write(ROW)
        found = status_in(tmp_path)
        assert found is not None
        assert (found.state, found.job, found.launcher_pid, found.train) == ("running", "job", os.getpid(), ROW)
    found = status_in(tmp_path)
    assert found is not None
    assert found.state == "finished"
    assert "finished" in CliRunner().invoke(app, ["top", str(tmp_path), "--once"]).stdout
    result = {"world": "process", "strategy": "s()", "workers": 2, "diverged": "NaN in step 3"}
    (tmp_path / "result.json").write_text(json.dumps(result))
    found = status_in(tmp_path)
    assert found is not None
    assert (found.state, found.why) == ("failed", "NaN in step 3")


@pytest.mark.parametrize("brief", [False, True])
def test_lines_are_decoded_together_as_one_by_one(brief: bool) -> None:
    """A brief reader leaves out `more`, but for the last row of each kind and rows with a noise scale."""
    rows = [{"kind": "train", "step": step, "loss": 1.0, "compute_s": 0.5} for step in range(1, 6)]
    rows[1] |= {"noise_scale": 3.0}
    rows.append(rows[0] | {"kind": "test"})
    lines = [json.dumps(row).encode() for row in rows] + [line_of(record).encode() for record in KINDS]
    single = [record_of(json.loads(line)) for line in lines]
    rows_of = [number for number, record in enumerate(single) if isinstance(record, TrainRow | TestRow)]
    left_out = [number for number in rows_of if brief and number not in (1, 4, 5)]
    assert left_out == ([0, 2, 3] if brief else [])
    expected = [msgspec.structs.replace(each, more={}) if n in left_out else each for n, each in enumerate(single)]
    assert records_in(lines, brief=brief) == expected
    assert records_in([*lines, b'{"kind": "of the future"}']) == single
    with pytest.raises(ValueError, match="not a JSON object"):
        records_in([*lines, b"[]"])


def test_a_brief_reader_has_the_last_exchange_of_each_worker() -> None:
    """A run writes one for each row, and the live page shows one."""
    exchanges = [
        ExchangeRow(step=step, since_step=step - 1, waited_s=0.0, ops={}, worker=None if step < 4 else step % 20)
        for step in range(1, 50)
    ]
    rows: list[StreamRecord] = [TrainRow(step=step, loss=1.0) for step in range(1, 50)]
    records = [record for pair in zip(rows, exchanges, strict=True) for record in pair]
    lines = [line_of(record).encode() for record in records]
    kept = [exchanges[2], *exchanges[-20:]]
    assert records_in(lines) == records
    assert records_in(lines, brief=True) == [each for each in records if each in rows or each in kept]


def test_a_broken_row_hides_no_event_and_is_told_until_it_is_mended(tmp_path: Path) -> None:
    with logged(tmp_path, START):
        pass
    broken, whole = b'{"kind": "train", "step": 1, "loss": 1.0}\n[]\n', b'{"kind": "train", "step": 1, "loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(broken)
    source = RunStream(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="remove that line"):
            source.look()
    (tmp_path / "mended").write_bytes(whole)
    (tmp_path / "mended").replace(tmp_path / "metrics.jsonl")
    assert [type(record) for record in source.look()] == [RunStarted, TrainRow, RunFinished]
    assert source.look() == []
