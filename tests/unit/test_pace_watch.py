"""Ranks leave snapshots on a board, in the program or in a thread behind it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from polytempo.diagnosis.host_sample import HostSample, ProcessTime
from polytempo.report.status.records import ExchangedOp, ExchangeRow
from polytempo.report.status.row_exchanges import RankTotals, RowExchanges
from polytempo.training.job.step_parts import step_parts
from polytempo.training.step.pace_watch import EVERY, MAX_COST, MemoryBoard, PaceMeeting, PaceWatch
from polytempo.worlds.trace import OpTotals

RANKS, SLOW = 3, 1
DEADLINE_S = 60.0


class StepClock:
    """A step takes 1 s, of the slow rank 1.5 s; the others wait."""

    def __init__(self, rank: int) -> None:
        self.steps, self._busy_s = 0, 1.5 if rank == SLOW else 1.0

    def now_s(self) -> float:
        return 1.5 * self.steps

    def busy_s(self) -> float:
        return self._busy_s * self.steps

    def waited_s(self) -> float:
        return self.now_s() - self.busy_s()


class Host:
    """A host where process 4711 takes a core more at each look."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self, at_s: float) -> HostSample:
        self.looks += 1
        stress = ProcessTime("stress", 900, 1.0 * self.looks, 0)
        return HostSample(float(self.looks), (20, 1), frozenset({0}), {4711: stress})


def watches(hosts: list[Host] | None, *, behind: bool) -> tuple[list[StepClock], list[PaceWatch]]:
    board, clocks = MemoryBoard(RANKS), [StepClock(rank) for rank in range(RANKS)]
    meetings = [PaceMeeting(board, rank, RANKS, samples=hosts and hosts[rank]) for rank in range(RANKS)]
    return clocks, [PaceWatch(m, clock, behind=behind) for m, clock in zip(meetings, clocks, strict=True)]


def trained(clocks: list[StepClock], ranks: list[PaceWatch], steps: int) -> list[dict[str, Any]]:
    for step in range(1, steps + 1):
        for clock, watch in zip(clocks, ranks, strict=True):
            clock.steps = step
            watch.after_step(step)
            settle(watch)
    for watch in ranks:
        watch.finish()
    return ranks[0].told


def settle(watch: PaceWatch) -> None:
    """Wait for the thread."""
    deadline_s = time.monotonic() + DEADLINE_S
    while watch._meeting is not None and watch._meeting.busy:
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("behind", [False, True])
def test_the_slow_rank_reads_its_host_only_when_it_is_asked(behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polytempo.training.step.pace_watch.MAX_COST", 1e9)
    hosts = [Host() for _ in range(RANKS)]
    [found] = trained(*watches(hosts, behind=behind), steps=30)
    assert found["text"] == "rank 1 is 50 % slower since step 1: 1.0 cores are used by pid 4711 (stress)"
    assert [host.looks for host in hosts] == [0, 2, 0]


def test_without_hosts_it_is_told_within_20_steps() -> None:
    [found] = trained(*watches(None, behind=False), steps=20)
    assert found["text"].startswith("rank 1 is 50 % slower since step 1: ")


def test_a_run_that_ends_before_the_cause_tells_what_is_known() -> None:
    hosts = [Host() for _ in range(RANKS)]
    [found] = trained(*watches(hosts, behind=False), steps=15)
    assert "nothing on its host explains it" in found["text"]


def test_meetings_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meeting that takes 0.3 s of a processor is followed by 100 s without one."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    [clock, *_], [watch, *_] = watches(None, behind=True)
    meeting, met = watch._meeting, list[int]()
    assert meeting is not None
    monkeypatch.setattr(meeting, "meet", lambda snapshot, compares, now_s: met.append(snapshot is not None))
    for step in range(1, 2001):
        clock.steps = step
        watch.after_step(step)
        meeting.spent_s += 0.3 if meeting.busy else 0.0
        meeting.busy = False
        now[0] += 1.0
    watch.finish()
    assert EVERY * sum(met) < 2000
    assert sum(met) <= 2 + 2000 * MAX_COST / 0.3


def test_a_pause_in_a_meeting_is_not_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes 7 ms of each meeting: there is one every three steps all the same."""
    now, met = [1000.0], list[int]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    _, [_, watch, _] = watches(None, behind=True)

    class Paused:
        def do(self, job: Any) -> None:
            now[0] += 0.007
            job()

        def close(self) -> None: ...

    watch._thread = Paused()  # type: ignore[assignment]
    monkeypatch.setattr(watch._meeting, "_board", None)
    for step in range(1, 31):
        before = now[0]
        watch.after_step(step)
        if now[0] > before:
            met.append(step)
        now[0] += 0.02
    assert met == list(range(1, 31, EVERY))


def test_batches_are_counted_and_scores_are_not() -> None:
    clock = StepClock(0)
    watch = PaceWatch(None, clock)
    watch.asks_batch()
    clock.steps = 2
    watch.has_batch()
    assert watch.times.read_s == 3.0
    watch.has_batch()
    assert watch.times.read_s == 3.0
    watch.after_step(2)
    clock.steps = 4
    with torch.no_grad():
        watch.has_batch()
    watch.has_batch()
    assert watch.times.read_s == 3.0


def test_a_board_that_is_gone_ends_the_comparison_and_not_the_run() -> None:
    class Gone:
        calls = 0

        def put(self, *_: Any) -> None:
            self.calls += 1
            raise RuntimeError("connection reset by peer")

        read = ask = asked = put

    gone = Gone()
    watch = PaceWatch(PaceMeeting(gone, 0, 2), StepClock(0))
    for step in range(1, 20):
        watch.after_step(step)
    assert gone.calls == 1
    assert watch.told == []


def test_rank_0_has_the_parts_of_a_step_for_its_rows() -> None:
    clocks, ranks = watches(None, behind=False)
    now = RankTotals({"send": OpTotals(15, 4000, 0.5), "recv": OpTotals(5, 0, 0.5)})
    for step in range(1, 8):
        for clock, watch in zip(clocks, ranks, strict=True):
            clock.steps = step
            watch.after_step(step)
    parts = step_parts(ranks[0], now, 8, began_at=0, off_s=0.0, off_bytes=800)
    waits = {"wait_s": pytest.approx(1 / 3, abs=1e-3), "least_wait_s": 0.0, "read_s": 0.0}
    assert parts == {"compute_s": pytest.approx(7 / 6, abs=1e-3), **waits, "sent_bytes": 400.0, "messages": 2.5}
    assert step_parts(ranks[1], now, 8, began_at=0, off_s=0.0, off_bytes=0) == {}
    assert step_parts(None, now, 8, began_at=0, off_s=0.0, off_bytes=0) == {}


def test_exchanges_are_counted_between_rows() -> None:
    """The first row of a resumed run counts from the step that it goes on from, and nothing from before."""
    meter = RowExchanges(worker=1)
    meter.begin(4, RankTotals({"all_reduce": OpTotals(5, 500, 1.25)}, 2.0))
    found = list[ExchangeRow | None]()
    for step, count, waited_s in ((6, 7, 3.0), (8, 7, 3.5), (12, 8, 4.5)):
        found.append(
            meter.since_last(step, RankTotals({"all_reduce": OpTotals(count, 100 * count, 0.25 * count)}, waited_s))
        )
    first, second = ({"all_reduce": ExchangedOp(n, 100 * n, 0.25 * n)} for n in (2, 1))
    assert found[1] is None
    assert [row and (row.since_step, row.step, row.ops) for row in found] == [(4, 6, first), None, (8, 12, second)]
    assert [row and (row.waited_s, row.worker) for row in found] == [(1.0, 1), None, (1.0, 1)]
    assert meter.since_last(13, RankTotals()) is None
