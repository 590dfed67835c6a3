"""Attacks on a run's stream: full disks, files cut anywhere, hostile rows, clocks set back, folders that vanish, URLs.

A reader gives the first records of a run, or one ValueError, and never others. A run goes on.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from typer.testing import CliRunner

import polytempo as pt
from object_store import bucket
from polytempo.cli.main import app
from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.jobs import find
from polytempo.report.runs import load_run
from polytempo.report.status.event_log import EventLog, logged
from polytempo.report.status.line_file import LineFile
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.records import (
    Logged,
    LoggedText,
    ProcessEvent,
    RunFinished,
    RunStarted,
    StreamRecord,
    TrainRow,
    record_of,
)
from polytempo.report.status.rows import RowFollower, last_rows, read_rows
from polytempo.report.status.stream import RunStream, ends_of, follow, status_in, stream
from polytempo.runs.frame.live_run import LiveRun, RunEvents, ShownRun
from polytempo.ui.of_run.run_columns import RunColumns
from polytempo.ui.run_list import facts_of

START = RunStarted(job="job", strategy="s()", world="process", workers=2)


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 1.0 / (1 + step), **more}


# ------------------------------------------------------------------ full disks


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel's limit on the size of files stands for a full disk: the part that fits is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_that_do_not_fit_are_left_out_whole_and_later_ones_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. Rows are written. 2. The disk is full: rows are left out, with one note. 3. There is room again."""
    with MetricsWriter(tmp_path) as metrics, EventLog(tmp_path) as events:
        with files_of_at_most(500):
            for step in range(50):
                metrics.write(row(step))
                events.append(ProcessEvent("worker-1", "died", float(step), "started again"))
        metrics.write(row(50))
        events.append(RunFinished(state="finished"))
    steps = [each["step"] for each in read_rows(tmp_path)]
    assert steps[-1] == 50
    assert steps[:-1] == list(range(len(steps) - 1)) != []
    *faults, end = stream(tmp_path)
    assert end == RunFinished(state="finished")
    assert len([each for each in faults if isinstance(each, ProcessEvent)]) > 1
    assert len([each for each in faults if isinstance(each, TrainRow)]) == len(steps)
    assert capsys.readouterr().err.count("lacks lines") == 2, "a note for each file"


def test_a_full_disk_changes_no_bit_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, strategy = find("digits"), pt.strategies.sync_sgd()
    plain = pt.simulate(job, strategy, 2, steps=6)

    def half(stream: BinaryIO, content: bytes, path: Path) -> None:
        stream.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "write", half)
    found = pt.simulate(job, strategy, 2, steps=6, out=tmp_path)
    assert (found.parameters_sha256, found.seconds, found.trace_hash) == (
        plain.parameters_sha256,
        plain.seconds,
        plain.trace_hash,
    )
    assert read_rows(tmp_path) == []
    assert (tmp_path / "result.json").is_file()


def test_a_note_that_cannot_be_written_either_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of standard error is often on the same disk."""

    class Full:
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lines = LineFile(tmp_path / "lines")
    monkeypatch.setattr("sys.stderr", Full())
    with files_of_at_most(5):
        lines.write(b"0123456789\n")
    lines.write(b"later\n")
    lines.close()
    monkeypatch.undo()
    assert (tmp_path / "lines").read_bytes() == b"later\n"


# ------------------------------------------------------------------ files that were cut


def recorded(folder: Path) -> list[StreamRecord]:
    """A run with each file, and text of several bytes a letter."""
    folder.mkdir(exist_ok=True)
    with logged(folder, START) as events, MetricsWriter(folder) as metrics:
        for step in range(4):
            metrics.write(row(step, samples=8 * step, seconds=0.5 * step))
            events.append(ProcessEvent("worker-1", "starb an „Überlast“", float(step), "начат снова"))
            metrics.write({"kind": "log", "step": step, "values": {"f1": 0.5}})
    raw = json.dumps({"kind": "text", "name": "probe", "step": 4, "text": "日本語 ± ✓"}, ensure_ascii=False)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(raw + "\n")
    return stream(folder)


def test_a_run_that_was_killed_at_any_byte_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "whole")
    contents = {name: (tmp_path / "whole" / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")}
    cut = tmp_path / "cut"
    cut.mkdir()
    for name, content in contents.items():
        for end in range(len(content)):
            for other in contents:
                (cut / other).write_bytes(content[:end] if other == name else contents[other])
            lost = len(content[:end].split(b"\n")) - 1
            found = stream(cut)
            assert len(found) == len(whole) - (content.count(b"\n") - lost), (name, end)
            assert all(each in whole for each in found), (name, end)
            facts = facts_of(cut)
            assert facts["state"] in ("running", "finished", "unknown", "gone")
            assert name != "metrics.jsonl" or (facts["train_loss"] is None) == (end < content.index(b"\n"))


def test_files_with_any_byte_changed_are_one_error_or_a_run(tmp_path: Path) -> None:
    whole = recorded(tmp_path)
    contents = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")}
    draw = random.Random(35)
    for _ in range(300):
        name, content = draw.choice(list(contents.items()))
        at = draw.randrange(len(content))
        changed = content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
        (tmp_path / name).write_bytes(changed)
        for read in (stream, facts_of, status_in, lambda run: RunColumns(run).look()):
            with suppress(ValueError):
                read(tmp_path)
        (tmp_path / name).write_bytes(content)
    assert stream(tmp_path) == whole


def test_a_half_written_event_is_given_when_it_is_whole(tmp_path: Path) -> None:
    line = b'{"kind": "fault", "who": "worker-1", "how": "died", "at_s": 1.0, "then": "started again"}\n'
    with EventLog(tmp_path) as events:
        events.append(START)
        reader = RunStream(tmp_path)
        assert reader.look() == [START]
        path = tmp_path / "events.jsonl"
        for at in range(len(line) - 1):
            with path.open("ab") as file:
                file.write(line[at : at + 1])
            assert reader.look() == []
        with path.open("ab") as file:
            file.write(b"\n")
        assert reader.look() == [ProcessEvent("worker-1", "died", 1.0, "started again")]


# ------------------------------------------------------------------ folders and URLs


def test_a_folder_that_vanishes_stops_no_writer_and_is_one_error_of_readers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with EventLog(run) as events, MetricsWriter(run) as metrics:
        events.append(START)
        metrics.write(row(1))
        reader, columns, shown = RunStream(run), RunColumns(run), list[Any]()
        follower = RowFollower(run, shown.append, earlier=True)
        assert len(reader.look()) == 2
        columns.look()
        shutil.rmtree(run)
        metrics.write(row(2))
        events.append(RunFinished(state="finished"))
        follower.look(last=True)
        assert shown == []
    for read in (reader.look, columns.look, partial(stream, run)):
        with pytest.raises(ValueError, match="holds no"):
            read()
    assert status_in(run) is None
    assert facts_of(run)["state"] in ("unknown", "gone")
    done = CliRunner().invoke(app, ["top", str(run), "--once"])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


def test_a_second_run_in_the_folder_is_never_joined_to_the_first(tmp_path: Path) -> None:
    """A reader that was away for the end of the first one sees the second from its start."""
    reader, seen = RunStream(tmp_path), list[StreamRecord]()
    for part in (1, 2):
        with EventLog(tmp_path, fresh=True) as events, MetricsWriter(tmp_path) as metrics:
            events.append(RunStarted(job=f"job-{part}", strategy="s()", world="process", workers=2))
            for step in range(3 * part):
                metrics.write(row(step, part=part))
            seen = reader.look()
    assert seen[0] == RunStarted(job="job-2", strategy="s()", world="process", workers=2)
    assert [each.more["part"] for each in seen if isinstance(each, TrainRow)] == [2] * 6


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """`folder` over HTTP on loopback, to read only."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_run_on_a_web_server_is_read_and_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    whole = recorded(tmp_path / "run")
    with served(tmp_path) as url:
        run = UrlPath(f"{url}/run")
        assert stream(run) == list(follow(run, every_s=0.0)) == whole
        assert facts_of(run)["train_loss"] == facts_of(tmp_path / "run")["train_loss"]
        assert [each["step"] for each in read_rows(run)] == [each["step"] for each in read_rows(tmp_path / "run")]
        with pytest.raises((OSError, ValueError)):
            MetricsWriter(run)


@pytest.mark.parametrize("at_url", [False, True])
def test_rows_grow_at_a_url_as_in_a_file(at_url: bool, tmp_path: Path) -> None:
    run: Place = UrlPath(bucket(tmp_path)) if at_url else tmp_path
    with logged(run, START), MetricsWriter(run) as metrics:
        metrics.write(row(1))
    with logged(run, START, resume=True), MetricsWriter(run, resumed_at=1) as metrics:
        metrics.write(row(2))
    assert [each.step for each in stream(run) if isinstance(each, TrainRow)] == [1, 2]
    start, finish = ends_of(run)
    assert (start is not None, finish) == (True, RunFinished(state="finished"))


# ------------------------------------------------------------------ clocks, numbers, names


def test_a_clock_that_is_set_back_holds_up_neither_the_status_nor_the_news(tmp_path: Path) -> None:
    now, history = [1e9], RunEvents()
    with LiveRun(tmp_path, ShownRun("job", "s()", 2), history, clock=lambda: now[0]) as live:
        now[0] += 2
        live.look()
        now[0] -= 3600
        history.add("worker-1", "died", -3598.0, "started again")
        live.look()
        status = status_in(tmp_path)
        assert status is not None
        assert (status.written_s, status.num_events) == (now[0], 1)
        assert any(isinstance(each, ProcessEvent) for each in stream(tmp_path))
    assert facts_of(tmp_path)["state"] == "finished"


def test_times_that_go_back_and_numbers_at_their_limits_are_read(tmp_path: Path) -> None:
    with logged(tmp_path, START), MetricsWriter(tmp_path) as metrics:
        for step, seconds in ((1, 5.0), (2, -1.0), (2, 4.0), (2**53 - 1, 1e299)):
            metrics.write(row(step, seconds=seconds, samples_per_s=float("inf"), staleness=float("nan")))
    columns = RunColumns(tmp_path)
    columns.look()
    for axis in columns.axes(1.0):
        for quantity in columns.quantities():
            columns.curves(axis, quantity, 100)
    assert [each.samples_per_s for each in stream(tmp_path) if isinstance(each, TrainRow)] == [None] * 4
    assert facts_of(tmp_path)["samples_per_s"] is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_one_error(number: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "train", "step": 1, "loss": 1.0, "own": {number}}}\n' * 2)
    for read in (stream, read_rows):
        with pytest.raises(ValueError, match=f"{number} is not a number of JSON"):
            read(tmp_path)
    assert last_rows(tmp_path) == []


HOSTILE = ("<script>alert(1)</script>", "a\nb", "\x1b[2J", "\u202e", "x" * 201, "", "\udcff", "a\0b")


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_hostile_name_is_refused_where_it_is_logged(name: str) -> None:
    with pytest.raises(ValueError, match="a name has 1 to 200"):
        pt.log({name: 1.0}, step=0)


class Named(Exception):
    """An error with any text."""


@pytest.mark.parametrize("text", ["bad \udcff", "\x1b[2J\x07", "a\0b", "日本語"], ids=ascii)
def test_a_run_that_ends_with_any_error_text_leaves_a_whole_end(text: str, tmp_path: Path) -> None:
    history = RunEvents()
    history.add("worker-1", text, 1.0, text)
    with pytest.raises(Named), LiveRun(tmp_path, ShownRun("job", "s()", 2), history):
        raise Named(text)
    end = stream(tmp_path)[-1]
    assert isinstance(end, RunFinished)
    assert end.state == "failed"
    assert facts_of(tmp_path)["state"] == "failed"
    assert CliRunner().invoke(app, ["top", str(tmp_path), "--once"]).exit_code == 0


def test_huge_rows_hide_no_others(tmp_path: Path) -> None:
    values = {f"{number:0200d}": number * 1.1 for number in range(1000)}
    with logged(tmp_path, START), MetricsWriter(tmp_path) as metrics:
        metrics.write(row(1))
        metrics.write({"kind": "log", "step": 1, "values": values})
        metrics.write({"kind": "text", "name": "t", "step": 1, "text": "é" * 20_000})
    reader, found = RunStream(tmp_path, most_bytes=1000), list[StreamRecord]()
    while not reader.ended or reader.behind:
        found += reader.look()
    assert [type(each) for each in found[1:]] == [TrainRow, RunFinished, Logged, LoggedText]
    assert facts_of(tmp_path)["train_loss"] == 0.5


def test_rows_of_a_later_rank_and_of_one_step_twice_are_all_given(tmp_path: Path) -> None:
    told = [{"kind": "log", "step": 3, "values": {"f1": value}, "worker": 7} for value in (0.25, 0.5)]
    with MetricsWriter(tmp_path) as metrics:
        for each in told:
            metrics.write(each)
    assert stream(tmp_path) == [record_of(each) for each in told]


# ------------------------------------------------------------------ old runs


OLD = Path(__file__).parents[1] / "old_run"


def test_the_folder_of_an_old_run_is_read_by_every_reader(tmp_path: Path) -> None:
    """A simulation of the version before `events.jsonl`: its rows and its result."""
    run = load_run(OLD)
    assert [each["step"] for each in run.rows("train")] == [2, 4]
    records = stream(OLD)
    assert (type(records[0]), records[-1]) == (RunStarted, RunFinished(state="finished"))
    assert len([each for each in records if isinstance(each, TrainRow)]) == 2
    status = status_in(OLD)
    assert status is not None
    assert (status.job, status.workers, status.state) == ("digits", 2, "finished")
    assert facts_of(OLD)["accuracy"] == run.result["accuracy"]
    for words in (["top", str(OLD), "--once"], ["report", str(OLD), "--out", str(tmp_path / "page.html")]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
