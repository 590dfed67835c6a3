"""Trackers: their text, the records that they get, and the numbers that each library reads back."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import msgspec
import numpy as np
import pytest
from matplotlib import image as pictures
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import polytempo as pt
from polytempo.cli.options.command_options import given_options
from polytempo.core.calls.refusals import Incompatible
from polytempo.report.status.event_log import EventLog
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
)
from polytempo.spec.tracker_call import TRACKERS, parse_tracker
from polytempo.trackers import TrackedRun, Tracker, table, tracked
from polytempo.trackers.bookmark import Bookmark
from polytempo.trackers.feed import TrackerFeed
from polytempo.trackers.words import sentence
from polytempo.training.observe import whole_checkpoint
from polytempo.worlds.trace import Event, write_chrome_trace
from unit.test_profiles import profile_of

t = pt.trackers


# ----------------------------------------------------------------------------------------------------------- as text


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("tensorboard", t.tensorboard()),
        (" tensorboard ", t.tensorboard()),
        ("tensorboard:runs/all", t.tensorboard("runs/all")),
        ("wandb:project=x", t.wandb(project="x")),
        ("wandb:x", t.wandb(project="x")),
        ("wandb:project=2024,mode=offline", t.wandb(project="2024", mode="offline")),
        ("wandb(project='x', mode=offline)", t.wandb(project="x", mode="offline")),
        ("mlflow:http://127.0.0.1:5000", t.mlflow("http://127.0.0.1:5000")),
        ("mlflow:http://host:5000/?a=b", t.mlflow("http://host:5000/?a=b")),
        ("mlflow:uri=file:///tmp/m,experiment=e", t.mlflow("file:///tmp/m", "e")),
        ("trackio:project=x", t.trackio("x")),
        ("comet:project=x,mode=offline", t.comet("x", mode="offline")),
        ("prometheus:9000", t.prometheus(9000)),
        ("prometheus:port=9464", t.prometheus()),
        ("opentelemetry:http://localhost:4318/v1/traces", t.opentelemetry("http://localhost:4318/v1/traces")),
        ("kubeflow", t.kubeflow()),
    ],
)
def test_text_is_a_call(text: str, call: t.TrackerCall) -> None:
    assert parse_tracker(text) == call
    assert parse_tracker(str(call)) == call, "a tracker's text makes it again"
    assert pt.RunOptions(trackers=text, out="x").trackers == (call,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensorbord", "did you mean tensorboard"),
        ("neptune:project=x", "there is no tracker 'neptune'; there are: comet, kubeflow"),
        ("wandb:projct=x", "did you mean project"),
        ("wandb:project=a,b", "wandb has no argument 'b'"),
        ("prometheus:abc", "expected an int"),
        ("prometheus:host=0.0.0.0", "prometheus has no argument 'host'"),
        ("tensorboard:", "it is written tensorboard"),
        ("kubeflow:1", "it is written kubeflow"),
        ("", "expected a name"),
    ],
)
def test_wrong_text_is_refused_with_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_tracker(text)


def test_the_command_line_and_files_name_several(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('trackers = ["tensorboard", "wandb:x"]')
    for given in (given_options({"trackers": ["tensorboard", "wandb:x"]}), given_options({}, tmp_path / "a.toml")):
        assert given.run == {"trackers": (t.tensorboard(), t.wandb("x"))}
    with pytest.raises(ValueError, match=r"^--track nope: there is no tracker 'nope'"):
        given_options({"trackers": ["nope"]})


@pytest.mark.parametrize("given", [3, ["tensorboard", 3], object, Bookmark])
def test_objects_need_the_four_calls(given: object) -> None:
    with pytest.raises(ValueError, match="is not a tracker; give one of tensorboard"):
        pt.RunOptions(trackers=given, out="x")  # type: ignore[arg-type]  # a mistake


def test_trackers_need_a_folder() -> None:
    with pytest.raises(ValueError, match="trackers needs the run's folder"):
        pt.RunOptions(trackers="tensorboard")


def test_every_tracker_has_an_adapter() -> None:
    assert set(table.ADAPTERS) == set(TRACKERS)


def test_a_missing_library_is_refused_with_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.ADAPTERS, "wandb", table.ADAPTERS["wandb"]._replace(library="not_here.at_all"))
    with pytest.raises(Incompatible, match=r"PT2201: tracker wandb .* pip install 'polytempo\[wandb\]'"):
        table.check_libraries([t.wandb()])


# --------------------------------------------------------------------------------------------------- their numbers

ROWS: list[StreamRecord] = [
    TrainRow(step=1, loss=2.25, epoch=0.5, samples=32, seconds=0.5, samples_per_s=64.0),
    TestRow(step=1, loss=2.5, accuracy=0.25, epoch=0.5, samples=32, seconds=0.5),
    TrainRow(step=2, loss=None, epoch=1.0, samples=64, seconds=1.0, more={"delays": [0.5, None, 2], "done": True}),
    TrainRow(step=3, loss=1.5, worker=1, idle_share=0.25, staleness=1.5),
    Logged(step=3, values={"perplexity": 31.0}),
    ExchangeRow(step=3, since_step=2, waited_s=0.25, ops={"send": ExchangedOp(4, 480, 0.5)}),
]
NUMBERS = [
    {"epoch": 0.5, "samples": 32, "seconds": 0.5, "train/loss": 2.25, "train/samples_per_s": 64.0},
    {"epoch": 0.5, "samples": 32, "seconds": 0.5, "test/loss": 2.5, "test/accuracy": 0.25},
    {"epoch": 1.0, "samples": 64, "seconds": 1.0, "train/delays/0": 0.5, "train/delays/2": 2},
    {"train/loss/worker-1": 1.5, "train/idle_share/worker-1": 0.25, "train/staleness/worker-1": 1.5},
    {"perplexity": 31.0},
    {"exchange/waited_s": 0.25, "exchange/send/count": 4, "exchange/send/bytes": 480, "exchange/send/seconds": 0.5},
]
EVENTS: list[StreamRecord] = [
    ProcessEvent(who="worker-1", how="was killed by SIGKILL", at_s=1.25, then="started again"),
    GroupStatus(generation=2, step=2, workers=3),
    CheckpointSaved(step=2, path="checkpoint/step-2"),
    Diagnosis(at_s=1.5, about="slow rank", who="rank-3", text="rank 3 is slow"),
]
TEXT = LoggedText(name="note", step=2, text="a & b\n<c>")
PICTURE = LoggedImage(name="square", step=3, path="square.png")
SENTENCES = [
    "1.2 s: worker-1 was killed by SIGKILL; started again",
    "step 2: group 2 of 3 workers",
    "step 2: checkpoint checkpoint/step-2",
    "1.5 s: rank 3 is slow",
]


def test_numbers_of_rows() -> None:
    assert [t.scalars(row) for row in ROWS] == NUMBERS
    assert t.scalars(EVENTS[0]) == {}


def test_events_are_sentences() -> None:
    assert [sentence(event) for event in EVENTS] == SENTENCES


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def facts(folder: Path, **others: object) -> TrackedRun:
    given = {
        "name": "first",
        "folder": str(folder),
        "job": "digits",
        "strategy": "local_sgd(period=8)",
        "world": "process",
        "workers": 2,
        "settings": {"lr": 0.5, "workers": 2, "allow_nan": False, "precision": "bf16"},
        "began_s": 1.75e9,
        "steps": 4,
        "identity": "abcd",
    }
    return TrackedRun(**(given | others))  # type: ignore[arg-type]


def hand(tracker: Tracker, run: TrackedRun, state: str = "finished") -> None:
    """All records, in order."""
    tracker.start(run)
    for row in ROWS:
        tracker.log(t.scalars(row), row.step)  # type: ignore[union-attr]  # rows have steps
    for event in [*EVENTS, TEXT, PICTURE]:
        tracker.event(event)
    tracker.finish(RunFinished(state=state, why="" if state == "finished" else "a reason"))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with a picture of 3 × 2 pixels."""
    pictures.imsave(tmp_path / "square.png", np.linspace(0, 1, 6).reshape(2, 3))
    return tmp_path


def test_tensorboard_reads_back_what_was_logged(folder: Path) -> None:
    hand(table.made(t.tensorboard()), facts(folder))
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for row, numbers in zip(ROWS, NUMBERS, strict=True):
        for name, value in numbers.items():
            expected.setdefault(name, []).append((row.step, value))  # type: ignore[union-attr]
    scalars = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert {tag.removeprefix("x-axes/"): values for tag, values in scalars.items()} == expected
    texts = {tag: [e.tensor_proto.string_val[0].decode() for e in found.Tensors(tag)] for tag in ("events", "note")}
    assert texts["events"] == SENTENCES
    assert texts["note"] == [TEXT.text]
    [picture] = found.Images("square")
    assert (picture.width, picture.height, picture.step) == (3, 2, 3)
    assert picture.encoded_image_string == (folder / "square.png").read_bytes()
    session = HParamsPluginData.FromString(found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    hparams = session.session_start_info.hparams
    assert hparams["lr"].number_value == 0.5
    assert hparams["precision"].string_value == "bf16"
    assert hparams["allow_nan"].bool_value is False


def test_a_resumed_run_goes_on_in_tensorboard_and_a_new_one_takes_its_place(folder: Path) -> None:
    def steps() -> list[int]:
        found = EventAccumulator(str(folder / "tensorboard")).Reload()
        return [event.step for event in found.Scalars("loss")]

    for resumed, step, seen in ((False, 1, [1]), (True, 2, [1, 2]), (False, 1, [1])):
        tracker = table.made(t.tensorboard())
        tracker.start(facts(folder, resumed=resumed))
        tracker.log({"loss": 1.0}, step)
        tracker.finish(RunFinished(state="finished"))
        assert steps() == seen


def test_profiles_are_where_tensorboards_plugin_looks(folder: Path) -> None:
    """A folder below the log directory with files `WORKER.pt.trace.json`, of events with the plugin's categories."""
    profiles = folder / "profile"
    profiles.mkdir()
    for rank in (0, 1):
        (profiles / f"rank-{rank}.json").write_bytes(msgspec.json.encode(profile_of(rank, 7.0)))
    os.utime(profiles / "rank-1.json", (1.0, 1.0))  # of an earlier run
    hand(table.made(t.tensorboard()), facts(folder))
    plugin = folder / "tensorboard" / "plugins" / "profile" / facts(folder).name
    assert [path.name for path in plugin.iterdir()] == ["n0_0.pt.trace.json"]
    trace = json.loads((plugin / "n0_0.pt.trace.json").read_text())
    slices = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    categories = {entry["name"]: entry["cat"] for entry in slices}
    assert categories["mm"] == "cpu_op"
    assert categories["send"] == "user_annotation"
    steps = [
        (entry["name"], round(entry["ts"]), round(entry["dur"])) for entry in slices if entry["name"].startswith("Prof")
    ]
    assert steps == [("ProfilerStep#3", 0, 4000), ("ProfilerStep#4", 4000, 16000)]


def test_prometheus_scrapes_the_last_numbers(folder: Path) -> None:
    port = free_port()
    tracker = table.made(t.prometheus(port))
    tracker.start(facts(folder))
    before_s = time.time()
    for row, numbers in zip(ROWS, NUMBERS, strict=True):
        tracker.log(numbers, row.step)  # type: ignore[union-attr]
    tracker.event(EVENTS[0])
    page_server = tracker._server  # type: ignore[attr-defined]
    assert page_server.server_address == ("127.0.0.1", port), "no other host reads a page without a password"
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        text = page.read().decode()
    tracker.finish(RunFinished(state="finished"))
    found = {
        (sample.name, sample.labels.get("worker", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    expected = {
        ("polytempo_step", ""): 3,
        ("polytempo_workers", ""): 2,
        ("polytempo_train_loss", ""): 2.25,
        ("polytempo_train_loss", "1"): 1.5,
        ("polytempo_train_idle_share", "1"): 0.25,
        ("polytempo_train_staleness", "1"): 1.5,
        ("polytempo_train_samples_per_s", ""): 64.0,
        ("polytempo_test_accuracy", ""): 0.25,
        ("polytempo_run_seconds", ""): 1.0,
        ("polytempo_perplexity", ""): 31.0,
        ("polytempo_faults_total", ""): 1,
    }
    assert {name: found[name] for name in expected} == expected
    assert before_s <= found["polytempo_last_step_timestamp_seconds", ""] <= time.time()
    assert 'strategy="local_sgd(period=8)"' in text
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)


class Posted(BaseHTTPRequestHandler):
    """Keeps posted bodies in the server's list."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing on standard error."""


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, dict[str, str], bytes]]]]:
    """A server on loopback: its address, and the posted bodies."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Posted)
    server.posted = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.posted  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def spans_in(posted: list[tuple[str, dict[str, str], bytes]]) -> list[Any]:
    return [
        span
        for _, _, body in posted
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def test_opentelemetry_sends_spans_of_the_times_in_rows(folder: Path) -> None:
    with collector() as (url, posted):
        for state in ("preempted", "finished"):
            hand(table.made(t.opentelemetry(f"{url}/v1/traces")), facts(folder), state)
    spans = spans_in(posted)
    assert len({span.trace_id for span in spans}) == 1, "a resumed run goes on in its trace"
    runs = [span for span in spans if span.name == "run"]
    assert [[event.name for event in run.events][3:7] for run in runs] == [SENTENCES] * 2
    assert [run.status.message for run in runs] == ["a reason", ""]
    began = int(1.75e9) * 10**9
    inside = [span for span in spans if span.parent_span_id == runs[0].span_id]
    times = [
        (span.name, (span.start_time_unix_nano - began) / 1e9, (span.end_time_unix_nano - began) / 1e9)
        for span in inside
    ]
    assert times == [("steps", 0, 0.5), ("evaluation", 0, 0.5), ("steps", 0.5, 1.0)]
    assert {each.key: each.value.double_value for each in inside[0].attributes}["train/loss"] == 2.25


def test_opentelemetry_sends_the_last_steps_of_the_trace(folder: Path) -> None:
    """A span for each rank's step, and in it a span for each operation, at the times of the trace."""
    trace = [
        Event(rank, step, op, sent, step + begin, step + end, peer)
        for step in range(1, 31)
        for rank in range(2)
        for op, sent, begin, end, peer in (("compute", 0, 0.0, 0.5, -1), ("send", 100, 0.5, 0.75, 1 - rank))
    ]
    write_chrome_trace(folder / "trace.json", [*trace, Event(0, 30, "save", 0, 40.0, 50.0)], title="t", dropped=0)
    with collector() as (url, posted):
        hand(table.made(t.opentelemetry(f"{url}/v1/traces")), facts(folder))
    spans = spans_in(posted)
    steps = {span.span_id: span for span in spans if span.name == "step"}
    assert len(steps) == 20 * 2
    (run,) = [span for span in spans if span.name == "run"]
    assert {span.parent_span_id for span in steps.values()} == {run.span_id}
    began, sends = int(1.75e9) * 10**9, [span for span in spans if span.name == "send"]
    assert len(sends) == 20 * 2
    told = {each.key: each.value.int_value for each in sends[-1].attributes}
    assert told == {"bytes": 100, "peer": 0}
    inside = steps[sends[-1].parent_span_id]
    assert {each.key: each.value.int_value for each in inside.attributes} == {"step": 30, "rank": 1}
    assert [(span.start_time_unix_nano - began) / 1e9 for span in (inside, sends[-1])] == [30.0, 30.5]
    assert (inside.end_time_unix_nano - began) / 1e9 == 30.75
    assert "save" not in {span.name for span in spans}


def test_kubeflow_is_told_of_the_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "token").write_text("secret\n")
    with collector() as (url, posted):
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"{url}/status")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(folder / "token"))
        for state in ("failed", "finished"):
            hand(table.made(t.kubeflow()), facts(folder), state)
    assert {headers["Authorization"] for _, headers, _ in posted} == {"Bearer secret"}
    told = [json.loads(body)["trainerStatus"] for _, _, body in posted]
    assert [status["progressPercentage"] for status in told] == [0, 75, 0, 100]
    assert {"name": "train/loss", "value": "2.25"} in told[-1]["metrics"]
    assert all(set(status) >= {"progressPercentage", "metrics", "lastUpdatedTime"} for status in told)


def test_kubeflow_needs_its_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    with pytest.raises(ValueError, match="TrainJob"):
        table.made(t.kubeflow()).start(facts(folder))


# -------------------------------------------------------------------------------------------------------- the feed


class Noted:
    """A tracker that keeps its calls; `wrong` is the call that raises, `held` holds up `log` until it is set."""

    def __init__(self, wrong: str = "", held: threading.Event | None = None) -> None:
        self.wrong, self.held = wrong, held
        self.calls: list[tuple[object, ...]] = []

    def start(self, facts: TrackedRun) -> None:
        self._note("start", facts.identity)

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._note("log", step)
        if self.held is not None:
            assert self.held.wait(60)

    def event(self, event: StreamRecord) -> None:
        self._note("event", sentence(event))

    def finish(self, status: RunFinished) -> None:
        self._note("finish", status.state)

    def _note(self, *call: object) -> None:
        if call[0] == self.wrong:
            raise RuntimeError(f"{self.wrong} cannot be done\nmore lines")
        self.calls.append(call)


def written(folder: Path, steps: range, events: int, *, resumed_at: int | None = None) -> None:
    """The files of a run."""
    with EventLog(folder, fresh=resumed_at is None) as log:
        log.append(RunStarted(job="j", strategy="s", world="process", workers=1, began_s=2e9))
        for event in EVENTS[:events]:
            log.append(event)
    with MetricsWriter(folder, resumed_at=resumed_at) as metrics:
        for step in steps:
            metrics.write({"kind": "train", "step": step, "loss": 1.0 / (1 + step)})


def fed(folder: Path, tracker: Tracker, **others: object) -> list[str]:
    """Feed the tracker with the whole stream; the notes."""
    notes: list[str] = []
    feed = TrackerFeed("mine", lambda: tracker, facts(folder, **others), notes.append, every_s=0.01)
    feed.begin()
    feed.end(RunFinished(state="finished"))
    assert feed.join(60)
    return notes


def test_a_tracker_is_fed_from_start_to_finish(tmp_path: Path) -> None:
    written(tmp_path, range(1, 4), 2)
    tracker = Noted()
    assert fed(tmp_path, tracker) == []
    logs = [("log", 1), ("log", 2), ("log", 3)]
    assert tracker.calls[1:] == [*logs, *(("event", said) for said in SENTENCES[:2]), ("finish", "finished")]


def test_a_resumed_run_is_the_same_run_and_no_row_comes_twice(tmp_path: Path) -> None:
    written(tmp_path, range(1, 4), 2)
    first, second, third = Noted(), Noted(), Noted()
    fed(tmp_path, first)
    written(tmp_path, range(3, 6), 4, resumed_at=2)
    fed(tmp_path, second, resumed=True)
    assert second.calls[0] == first.calls[0], "the identity"
    assert [call for call in second.calls if call[0] == "log"] == [("log", 4), ("log", 5)]
    assert [call for call in second.calls if call[0] == "event"] == [("event", said) for said in [*SENTENCES]]
    written(tmp_path, range(1, 3), 0)
    fed(tmp_path, third)
    assert third.calls[0] != first.calls[0], "another run in the same folder"
    assert [call for call in third.calls if call[0] == "log"] == [("log", 1), ("log", 2)]


class Buffering(Noted):
    """Loses its records if its process ends before `finish`."""

    def kept_s(self) -> float:
        return 0.0


def test_records_that_a_library_has_not_written_are_given_again_after_a_resume(tmp_path: Path) -> None:
    written(tmp_path, range(1, 4), 2)
    lost, again = Buffering("finish"), Noted()
    fed(tmp_path, lost)
    written(tmp_path, range(3, 6), 2, resumed_at=2)
    fed(tmp_path, again, resumed=True)
    assert again.calls[0] == lost.calls[0], "the identity"
    assert [call for call in again.calls if call[0] == "log"] == [("log", step) for step in range(1, 6)]


@pytest.mark.parametrize("kept", range(6))
def test_a_place_between_two_records_of_a_step_loses_neither(kept: int, tmp_path: Path) -> None:
    """Nor does a part that begins before that step give its records twice."""
    start = RunStarted(job="j", strategy="s", world="process", workers=1)
    records = [Logged(step=step, values={"a": 1.0}) for step in (1, 1, 2, 2, 2, 3)]
    first = Bookmark.of(tmp_path, "mine", fresh=True)
    assert all(first.is_new(record) for record in records[:kept])
    first.write()
    again = Bookmark.of(tmp_path, "mine", fresh=False)
    assert [again.is_new(each) for each in [start, *records]] == [False] * (1 + kept) + [True] * (6 - kept)
    assert not any(again.is_new(each) for each in [start, *records])


def test_places_are_bounded_where_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polytempo.trackers.feed._MOST_PLACES", 3)
    feed = TrackerFeed("mine", Noted, facts(tmp_path), print)
    bookmark = Bookmark.of(tmp_path, "mine", fresh=True)
    for _ in range(5):
        feed._keep(Buffering(), bookmark)
    assert len(feed._places) == 3


@pytest.mark.parametrize("wrong", ["start", "log", "event", "finish"])
def test_a_tracker_that_raises_is_named_once(wrong: str, tmp_path: Path) -> None:
    written(tmp_path, range(1, 4), 2)
    tracker = Noted(wrong)
    [note] = fed(tmp_path, tracker)
    said = f"{wrong} cannot be done"
    assert note == f"note: tracker mine ended with RuntimeError: {said}; the run goes on without it"
    assert wrong not in [call[0] for call in tracker.calls]


def test_a_tracker_that_hangs_is_dropped(tmp_path: Path) -> None:
    written(tmp_path, range(1, 4), 0)
    free, notes = threading.Event(), list[str]()
    tracker = Noted(held=free)
    feed = TrackerFeed("mine", lambda: tracker, facts(tmp_path), notes.append, every_s=0.01)
    feed.begin()
    while not any(call[0] == "log" for call in tracker.calls):
        feed.check(60)
    while not notes:
        feed.check(0.0)
    feed.check(0.0)
    assert notes == ["note: tracker mine has not answered for 0 s; the run goes on without it"]
    assert feed.join(0.0)
    free.set()
    feed.end(RunFinished(state="finished"))
    feed._thread.join(60)
    assert [call[0] for call in tracker.calls] == ["start", "log"]


def test_rows_of_an_earlier_run_are_not_read(tmp_path: Path) -> None:
    """The stream is taken from the start that this run's launcher writes."""
    written(tmp_path, range(1, 4), 0)
    tracker, notes = Noted(), list[str]()
    feed = TrackerFeed("mine", lambda: tracker, facts(tmp_path, began_s=2.5e9), notes.append, every_s=0.01)
    assert feed._begun(False) == (None, [])
    with EventLog(tmp_path, fresh=True) as log:
        log.append(RunStarted(job="j", strategy="s", world="process", workers=1, began_s=2.5e9))
    stream, records = feed._begun(False)
    assert stream is not None
    assert records


def test_two_trackers_of_a_name_have_names_of_their_own() -> None:
    given = [t.wandb("a"), Noted(), t.wandb("b"), Noted()]
    assert list(tracked._by_name(given)) == ["wandb", "Noted", "wandb-2", "Noted-2"]


def test_an_mlflow_run_ends_before_its_artifacts_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that fails, or that the end of the process cuts short, leaves no run as RUNNING, and no file outside."""
    library, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    library.MlflowClient = object  # type: ignore[attr-defined]
    for name in ("Metric", "Param", "RunTag"):
        setattr(entities, name, tuple)
    monkeypatch.setitem(sys.modules, "mlflow", library)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.delitem(sys.modules, "polytempo.trackers.adapters.mlflow_run", raising=False)
    adapter = import_module("polytempo.trackers.adapters.mlflow_run")
    monkeypatch.delitem(sys.modules, "polytempo.trackers.adapters.mlflow_run")
    calls: list[str] = []

    class Client:
        def set_terminated(self, run: str, state: str) -> None:
            calls.append(state)

        def log_artifact(self, run: str, file: str, folder: str) -> None:
            calls.append(str(Path(file).relative_to(tmp_path)))
            raise ValueError("no room at the server")

    def export(run: Path, file: Path) -> None:
        file.parent.mkdir(parents=True)
        file.touch()

    monkeypatch.setattr(whole_checkpoint, "export_checkpoint", export)
    run = adapter.MlflowRun(None, "e")
    run._folder, run._is_local, run._client, run._run = tmp_path, True, Client(), "r"
    with pytest.raises(ValueError, match="no room at the server"):
        run.finish(RunFinished(state="finished"))
    assert calls == ["FINISHED", "trackers/mlflow-r/model.safetensors"]
    assert list((tmp_path / "trackers").iterdir()) == []
