"""The trace: its counts, its hash, and the Chrome format."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import CLUSTER
from polytempo.cluster import lognormal
from polytempo.collectives import ring
from polytempo.core import Port
from polytempo.core.system.files import TAILS
from polytempo.worlds import (
    MOST_WRITTEN,
    Event,
    Trace,
    VirtualWorld,
    chrome_trace,
    combined_hash,
    joined,
    write_chrome_trace,
)
from polytempo.worlds.trace import OpTotals
from polytempo.worlds.trace_tail import EVERY_S, MOST_TAILS, TraceTail, read_tail, tail_of

NOISY = replace(CLUSTER, stragglers=lognormal(0.5))


async def training(port: Port) -> None:
    """Three steps of computing and a ring over 30 numbers (120 bytes)."""
    for step in range(3):
        await port.mark(step)
        await port.compute(lambda: None, flops=100.0)
        await ring(port, torch.zeros(30))


def traced(seed: int = 0, num_ranks: int = 3, max_events: int = 1000) -> Trace:
    return VirtualWorld(NOISY, num_ranks, seed=seed, max_events=max_events).run(training).trace


def test_one_seed_one_hash() -> None:
    assert traced(seed=1).hash == traced(seed=1).hash
    assert len({traced(seed).hash for seed in range(5)} | {traced(num_ranks=4).hash}) == 6


def test_one_event_of_a_group_may_be_many_messages() -> None:
    trace = Trace(timed=True, groups={0: range(3), 3: range(3, 5)})
    trace.add_messages(Event(0, 0, "send", 480, 1.0, 2.0), sent=4, received=5)
    assert trace.exchanged(2) == {"recv": OpTotals(5, 0, 0.0), "send": OpTotals(4, 480, 1.0)}
    assert trace.exchanged(4) == {}
    assert trace.messages[2, "send"] == 4


def test_totals() -> None:
    trace = traced()
    exchanged = trace.exchanged(0)
    assert {op: (each.number, each.sent_bytes) for op, each in exchanged.items()} == {
        "recv": (12, 0),
        "send": (12, 3 * 160),
    }
    assert exchanged["send"].seconds == trace.seconds[0, "send"]
    assert dict(trace.bytes_sent) == dict.fromkeys(range(3), 3 * 160)
    assert {op: count for (rank, op), count in trace.messages.items() if rank == 0} == {
        "compute": 3,
        "send": 12,
        "recv": 12,
    }
    computing = sum(event.end_s - event.start_s for event in trace.events if event.op == "compute" and event.rank == 1)
    assert trace.seconds[1, "compute"] == pytest.approx(computing)


def test_every_line_has_its_rank_step_peer_and_times() -> None:
    trace = traced()
    sends = [event for event in trace.events if event.op == "send"]
    assert {event.peer for event in sends if event.rank == 2} == {0}
    assert [event.step for event in trace.events if event.rank == 0] == [0] * 9 + [1] * 9 + [2] * 9
    assert all(0 <= event.start_s <= event.end_s for event in trace.events)


def test_events_are_bounded_and_totals_and_hash_are_not() -> None:
    whole, bounded = traced(), traced(max_events=10)
    assert (len(whole.events), whole.dropped) == (81, 0)
    assert (len(bounded.events), bounded.dropped) == (10, 71)
    assert bounded.events == whole.events[-10:], "the last ones: the run's present, not its begin"
    assert (bounded.bytes_sent, bounded.messages, bounded.hash) == (whole.bytes_sent, whole.messages, whole.hash)


BASE = Event(rank=1, step=2, op="send", bytes=40, start_s=0.5, end_s=1.0, peer=3)


@pytest.mark.parametrize(
    ("changed", "matters_without_times"),
    [
        ({"rank": 0}, True),
        ({"step": 3}, True),
        ({"op": "recv"}, True),
        ({"bytes": 41}, True),
        ({"peer": 2}, True),
        ({"start_s": 0.25}, False),
        ({"end_s": 1.5}, False),
    ],
)
def test_the_hash_covers_every_field_and_times_where_they_can_be_repeated(
    changed: dict[str, Any], matters_without_times: bool
) -> None:
    def hashed(event: Event, timed: bool) -> str:
        trace = Trace(timed=timed)
        trace.add(event)
        return trace.hash

    other = BASE._replace(**changed)
    assert hashed(BASE, timed=True) != hashed(other, timed=True)
    assert (hashed(BASE, timed=False) != hashed(other, timed=False)) is matters_without_times


def test_a_combined_hash_depends_on_the_order_of_ranks() -> None:
    assert combined_hash(["a", "b"]) != combined_hash(["b", "a"])
    assert combined_hash(["a", "b"]) == combined_hash(["a", "b"])


# ---------------------------------------------------------------------- Chrome's format


def slices(events: list[Event]) -> list[dict[str, Any]]:
    lines: Any = chrome_trace(events, title="t")["traceEvents"]
    return [line for line in lines if line["ph"] == "X"]


def test_a_slice_in_microseconds() -> None:
    assert slices([BASE]) == [
        {
            "name": "send",
            "cat": "communication",
            "ph": "X",
            "pid": 1,
            "tid": 1,
            "ts": 500_000.0,
            "dur": 500_000.0,
            "args": {"step": 2, "bytes": 40, "peer": 3},
        }
    ]


def test_a_file_holds_every_event_and_names_for_every_track(tmp_path: Path) -> None:
    trace = traced()
    write_chrome_trace(tmp_path / "trace.json", trace.events, title="digits")
    read = json.loads((tmp_path / "trace.json").read_text())
    assert (read["displayTimeUnit"], read["otherData"]) == ("ms", {"title": "digits", "dropped": 0})
    by_kind = {kind: [line for line in read["traceEvents"] if line["ph"] == kind] for kind in "MX"}
    assert len(read["traceEvents"]) == len(by_kind["M"]) + len(by_kind["X"])
    assert len(by_kind["X"]) == len(trace.events)
    for line in by_kind["X"]:
        assert line["ts"] >= 0
        assert line["dur"] >= 0
        assert {type(line["pid"]), type(line["tid"])} == {int}
    named = {(line["pid"], line["tid"]): line["args"]["name"] for line in by_kind["M"] if line["name"] == "thread_name"}
    assert set(named) == {(line["pid"], line["tid"]) for line in by_kind["X"]}
    assert [named[0, track] for track in range(3)] == ["compute", "communication", "recv"]
    processes = {line["pid"]: line["args"]["name"] for line in by_kind["M"] if line["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"], "nothing half-written stays behind"


def test_a_file_is_bounded_and_says_what_is_left_out(tmp_path: Path) -> None:
    """The events of all ranks that ended last, in any order; and each rank's earlier drops."""
    per_rank, path = MOST_WRITTEN // 2 + 5, tmp_path / "trace.json"
    events = [Event(rank, step, "compute", 0, float(step), step + 0.5) for rank in (0, 1) for step in range(per_rank)]
    write_chrome_trace(path, events, title="t", dropped=90)
    read = json.loads(path.read_text())
    kept = [line for line in read["traceEvents"] if line["ph"] == "X"]
    assert len(kept) == MOST_WRITTEN
    assert {(line["pid"], line["args"]["step"]) for line in kept} == {
        (event.rank, event.step) for event in events if event.step >= 5
    }
    assert read["otherData"] == {"title": "t", "dropped": 100}
    [mark] = [line for line in read["traceEvents"] if line["ph"] == "i"]
    assert (mark["name"], mark["ts"]) == ("100 earlier operations are left out", 5_000_000.0)


def test_excerpts_of_several_processes_are_joined() -> None:
    one, other = traced(seed=1), traced(seed=2, max_events=20)
    assert joined([one.excerpt(30), other.excerpt(30)]) == ([*one.events[-30:], *other.events], 51 + 61)


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.sampled_from(["compute", "send", "recv"])))


@given(spans)
def test_slices_on_one_track_never_overlap(given_spans: list[tuple[int, int, str]]) -> None:
    events = [Event(0, 0, op, 0, float(start), float(start + length)) for start, length, op in given_spans]
    on_track: dict[int, list[tuple[float, float]]] = {}
    for line in slices(events):
        on_track.setdefault(line["tid"], []).append((line["ts"], line["ts"] + line["dur"]))
    for track in on_track.values():
        track.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(track))


@pytest.mark.parametrize("max_events", [4, 7, 12, 100])
def test_an_event_of_a_group_is_that_of_each_of_its_ranks(max_events: int) -> None:
    groups = {0: range(3), 3: range(3, 5)}
    acting = [
        Event(r, step, op, 8 * r, step / 3, step + 0.5) for step in range(4) for op in ("a", "send") for r in (0, 3)
    ]
    short = Trace(timed=True, max_events=max_events, groups=groups)
    long = Trace(timed=True, max_events=max_events)
    for event in acting:
        short.add(event)
        for rank in groups[event.rank]:
            long.add(event._replace(rank=rank))
    assert short.events == long.events
    assert short.dropped == long.dropped == max(0, 40 - max_events)
    assert short.hash == long.hash
    assert short.bytes_sent == long.bytes_sent
    assert list(short.messages.items()) == list(long.messages.items())
    assert list(short.seconds.items()) == list(long.seconds.items())


# ---------------------------------------------------------------- the tail of a run that goes on


class Shown:
    """A tail that is due whenever it is asked, and keeps the events that come."""

    def __init__(self, most: int) -> None:
        self.most, self.rest_s, self.events = most, 0.0, list[Event]()

    def show(self, events: list[Event]) -> None:
        self.events = events


@pytest.mark.parametrize("groups", [None, {0: range(3)}])
@pytest.mark.parametrize("timed", [False, True])
def test_a_tail_has_the_last_events_and_changes_no_hash(groups: dict[int, range] | None, timed: bool) -> None:
    watched, alone, tail = *(Trace(timed=timed, groups=groups) for _ in range(2)), Shown(4)
    watched.show_in(tail)
    for trace in (watched, alone):
        for number in range(600):
            trace.add(Event(0, number, "compute", 0, float(number), number + 0.5))
    shown = [event.step for event in tail.events]
    assert len(shown) == 4
    assert shown[-1] == (511 if timed else 599)  # under a virtual clock it looks once in 512 events
    assert watched.excerpt(10) == alone.excerpt(10)
    for number in range(600):
        watched.add(Event(0, number, "send", 0, 0.0, 0.0))
    assert {event.op for event in tail.events} == {"compute"}  # the excerpt was the run's end


def test_a_tail_is_written_after_a_second_and_then_every_five(tmp_path: Path) -> None:
    now_s = [0.0]
    (tmp_path / TAILS).mkdir()
    tail = TraceTail(tmp_path / TAILS / "0.json", 2, lambda: now_s[0])
    trace = Trace(timed=False)
    trace.show_in(tail)
    written = list[int]()
    for step in range(15):
        now_s[0] = step / 2
        trace.add(Event(0, step, "send", 8, now_s[0], now_s[0], 1))
        found = read_tail(tmp_path / TAILS / "0.json") if (tmp_path / TAILS / "0.json").exists() else []
        written += [event.step for event in found[-1:]]
    assert sorted(set(written)) == [2, 2 + 2 * int(EVERY_S)]


def test_a_whole_trace_takes_the_place_of_tails_and_no_link_is_followed(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    event = Event(0, 0, "compute", 0, 0.0, 1.0)
    tail, missing = tail_of(run, 3), tail_of(tmp_path / "missing", 3)
    assert tail is not None
    assert missing is not None
    assert tail_of(run, MOST_TAILS) is tail_of(None, 0) is None
    missing.show([event])
    assert not (tmp_path / "missing").exists()
    tail.show([event])
    assert read_tail(run / TAILS / "3.json") == [event]
    write_chrome_trace(run / "trace.json", [event], title="a test")
    assert [each.name for each in run.iterdir()] == ["trace.json"]
    tail.show([event])
    (run / TAILS / "4.json.tmp").touch()  # of a process that was killed as it wrote
    (run / TAILS / "thesis.txt").touch()
    write_chrome_trace(run / "trace.json", [event], title="a test")
    assert [each.name for each in (run / TAILS).iterdir()] == ["thesis.txt"]
    (run / TAILS / "thesis.txt").unlink()
    (run / TAILS).rmdir()
    (run / TAILS).symlink_to(other)
    tail.show([event])
    write_chrome_trace(run / "trace.json", [event], title="a test")
    assert list(other.iterdir()) == []
