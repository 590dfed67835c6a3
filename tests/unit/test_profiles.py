"""Profiles of steps: the option's text, and ranks' profiles as one trace by the rules of Chrome's format."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.report.status.profile_trace import (
    RankProfile,
    TorchCall,
    exchange_seconds,
    merged,
    read_profiles,
    totals,
    write_merged,
)
from polytempo.spec.text.profiled_steps import ProfiledSteps, profiled_steps


@pytest.mark.parametrize(
    ("text", "steps", "ranks"),
    [
        ("20:30", ProfiledSteps(20, 30), [0, 3, 7]),
        (" 0:1 ", ProfiledSteps(0, 1), [0, 3, 7]),
        ("5:9@3,0,3", ProfiledSteps(5, 9, (0, 3)), [0, 3]),
        ("5:9@all", ProfiledSteps(5, 9, ()), [0, 3, 7, 8, 9]),
    ],
)
def test_steps_and_ranks_are_read_and_written(text: str, steps: ProfiledSteps, ranks: list[int]) -> None:
    found = profiled_steps(text)
    assert found == steps == profiled_steps(str(steps))
    assert [rank for rank in (0, 3, 7, 8, 9) if steps.has(rank)] == ranks


@pytest.mark.parametrize("text", ["", "20", "30:20", "20:20", "a:b", "1:2@", "1:2@x", "0:5000", 20])
def test_other_steps_are_refused(text: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="20:30"):
        pt.RunOptions(out=tmp_path, profile=text)  # type: ignore[arg-type]


def test_a_profile_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="profile needs the run's folder"):
        pt.RunOptions(profile="1:2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "more", "code"), [("ssp", {}, "PT2401"), ("sync_sgd", {"min_workers": 1}, "PT2402")]
)
def test_runs_without_common_steps_are_refused(strategy: str, more: dict[str, Any], code: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=code):
        pt.run("digits", strategy, 2, out=tmp_path, profile="1:2", **more)


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [
        (0, 40, None),
        (20, 30, None),
        (0, 25, "profile=20:30 recorded 5 of 10 steps, because the run has made the steps 0 to 24"),
        (28, 40, "profile=20:30 recorded 2 of 10 steps, because the run has made the steps 28 to 39"),
        (0, 20, "profile=20:30 recorded nothing, because the run has made the steps 0 to 19"),
        (30, 40, "profile=20:30 recorded nothing, because the run has made the steps 30 to 39"),
        (40, 40, "profile=20:30 recorded nothing, because the run has made no step"),
    ],
)
def test_steps_that_a_run_has_not_made(begin: int, end: int, said: str | None) -> None:
    assert ProfiledSteps(20, 30).missed(begin, end) == said


@pytest.mark.parametrize(
    ("text", "steps", "said"),
    [
        ("20:30", 20, "begins after the run's end: its 20 steps are counted from 0; give earlier ones, such as 10:20"),
        ("20:30", 3, "such as 0:3"),
        ("1:2@0,2", None, "there is no rank 2, as there are 2, counted from 0"),
    ],
)
def test_steps_and_ranks_that_a_run_cannot_have_are_refused(
    text: str, steps: int | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        pt.run("digits", "sync_sgd", 2, out=tmp_path, profile=text, steps=steps)


def profile_of(rank: int, begin_s: float) -> RankProfile:
    slices = [
        TorchCall("forward", "thread 1", begin_s + 0.001, 0.010),
        TorchCall("mm", "thread 1", begin_s + 0.002, 0.004),
        TorchCall("mm", "thread 1", begin_s + 0.007, 0.002),
        TorchCall("worker", "thread 2", begin_s + 0.001, 0.001),
    ]
    events = [
        (rank, 3, "send", 100, begin_s - 0.001, begin_s + 0.002, 1 - rank),
        (rank, 3, "recv", 0, begin_s + 0.001, begin_s + 0.004, 1 - rank),
    ]
    return RankProfile(rank, f"n{rank}", 3, 5, begin_s, begin_s + 0.02, slices, events, dropped=rank)


def checked(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The complete slices by track, where the trace keeps the rules of Chrome's format."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    processes, threads = set(), set()
    for entry in json.loads(json.dumps(trace))["traceEvents"]:
        assert entry["ph"] in {"X", "M", "i"}  # complete slices have their ends with them
        if entry["name"] == "process_name":
            processes.add(entry["pid"])
        elif entry["name"] == "thread_name":
            threads.add((entry["pid"], entry["tid"]))
        elif entry["ph"] == "X":
            assert entry["dur"] >= 0 <= entry["ts"]
            tracks[entry["pid"], entry["tid"]].append(entry)
    assert {pid for pid, _ in tracks} <= processes
    assert set(tracks) <= threads
    for slices in tracks.values():
        assert [entry["ts"] for entry in slices] == sorted(entry["ts"] for entry in slices)
        ends: list[float] = []
        for entry in slices:  # within a track slices are inside each other, or apart
            while ends and ends[-1] <= entry["ts"] + 1e-3:
                ends.pop()
            end = entry["ts"] + entry["dur"]
            assert not ends or end <= ends[-1] + 1e-3
            ends.append(end)
    return tracks


def test_ranks_are_one_trace_on_one_clock() -> None:
    trace = merged([profile_of(0, 5.0), profile_of(1, 5.5)], "title")
    tracks = checked(trace)
    begins = {pid: min(entry["ts"] for entry in tracks[pid, 1000]) for pid in (0, 1)}
    assert begins[1] - begins[0] == pytest.approx(0.5e6)
    assert trace["otherData"] == {"title": "title", "dropped": 1}
    assert {entry["args"]["name"] for entry in trace["traceEvents"] if entry["name"] == "process_name"} == {
        "rank 0 (n0)",
        "rank 1 (n1)",
    }


def test_totals_count_an_operation_without_the_operations_inside() -> None:
    found = {total.name: (total.calls, round(total.seconds, 6)) for total in totals(profile_of(0, 5.0).slices)}
    assert found == {"forward": (1, 0.004), "mm": (2, 0.006), "worker": (1, 0.001)}
    exchanged, waited = exchange_seconds(profile_of(0, 5.0))
    assert (exchanged, waited) == (pytest.approx(0.006), pytest.approx(0.003))


def test_a_folder_without_profiles_or_with_a_damaged_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no profile; run it with --profile 20:30"):
        read_profiles(tmp_path)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank-0.json").write_text('{"rank": "x"}')
    with pytest.raises(ValueError, match=r"rank-0.json: .* remove this file"):
        write_merged(tmp_path, "title")
