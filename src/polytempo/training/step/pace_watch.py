"""`PaceWatch`: each rank leaves its seconds on a board now and then, and rank 0 names a rank that holds the others up.

rank 3   ── step 30: put ──────────────────────── 33: put, is asked, reads its host ── 36, 39: put, with the cause
rank 0   ── step 30: put ── 31: read all, judge ── 33 ── 34 ── 36 ── 37 ── 39 ── 40: read all ── tell ──▶ a row

No rank waits for another rank, no operation of the world is used, and the run's trace has no line of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any, Protocol

import msgspec
import torch

from polytempo.diagnosis.host_sample import HostSample, cause_between
from polytempo.diagnosis.pace import PaceSnapshot, RankTimes, window_between
from polytempo.diagnosis.sentence import UNREAD, slow_row
from polytempo.diagnosis.slow_rank import SlowRank, SlowRankJudge
from polytempo.training.checkpoint.background import Background

EVERY = 3
"""Steps between two snapshots, at least."""
MAX_COST = 0.003
"""Bound on the part of the time that the median meeting takes: a meeting of 0.1 ms is followed by 33 ms without one."""
_BILLED = 9
"""A meeting is billed the median of so many last ones. To find a slow rank, or to look at the host, takes ten times
as long, and the next snapshots, which bring the cause, must not wait for that."""
_MOST_TOLD = 100
_PATIENCE = 4
"""Windows that rank 0 waits for a cause."""


class PaceClock(Protocol):
    """The times of one rank, in either world."""

    def now_s(self) -> float:
        """Seconds since the world began."""

    def busy_s(self) -> float:
        """Seconds of computing so far: without waits for others."""

    def waited_s(self) -> float:
        """Seconds of waiting for others so far."""


class PaceBoard(Protocol):
    """The place of snapshots for rank 0, and of its requests to ranks to look at their hosts."""

    def put(self, rank: int, snapshot: PaceSnapshot) -> None:
        """Replace the rank's snapshot."""

    def read(self) -> Mapping[int, PaceSnapshot]:
        """The snapshots of all ranks; empty until each has left one."""

    def ask(self, rank: int, slower: float) -> None:
        """Ask a rank for the cause of its slowness."""

    def asked(self, rank: int) -> tuple[int, float] | None:
        """The number of requests to this rank and how much slower it is; None: it was not asked."""


class PaceWatch:
    """One rank's part, in its program. `meeting`: None if ranks are not compared, then it only counts.

    `behind`: a thread performs the meeting, so that the program does not wait for the board. A meeting comes every
    three steps, and seldom enough that program and thread together spend at most `MAX_COST` of the time on it.
    """

    def __init__(
        self,
        meeting: PaceMeeting | None,
        clock: PaceClock,
        *,
        behind: bool = False,
        tell: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> None:
        self._meeting, self._clock, self._behind = meeting, clock, behind
        self.tell = tell
        """Takes rows about slow ranks, on rank 0."""
        self.told: list[dict[str, Any]] = []
        """The rows so far, on rank 0."""
        self._thread: Background | None = None
        self._due, self._compare_at, self._paid_s = 0, -1, 0.0
        self._read_s = 0.0
        self._asked_s: float | None = None

    @property
    def times(self) -> RankTimes:
        """This rank's totals so far."""
        clock = self._clock
        return RankTimes(clock.now_s(), clock.busy_s(), clock.waited_s(), self._read_s)

    @property
    def latest(self) -> Mapping[int, PaceSnapshot]:
        """The last snapshots of all ranks that rank 0 has compared; empty before and elsewhere."""
        return {} if self._meeting is None else self._meeting.latest

    # ------------------------------------------------------------------ batches

    def asks_batch(self) -> None:
        """The loop asks for its next batch now."""
        self._asked_s = self._clock.now_s()

    def has_batch(self) -> None:
        """The loop has its batch: time since it asked for it, or since the last step, was spent getting it."""
        asked_s, self._asked_s = self._asked_s, None
        if asked_s is not None and torch.is_grad_enabled():  # else it scores
            self._read_s += max(0.0, self._clock.now_s() - asked_s)

    # ------------------------------------------------------------------ steps

    def after_step(self, step: int) -> None:
        """This rank has finished so many steps: leave a snapshot, if it is time. Rank 0 compares one step later, when
        ranks that are in step have left theirs."""
        meeting = self._meeting
        if meeting is not None and (step == self._compare_at or step >= self._due) and not meeting.busy:
            self._meet(meeting, step)
        self._asked_s = self._clock.now_s()

    def _meet(self, meeting: PaceMeeting, step: int) -> None:
        begin_s, began_s = time.perf_counter(), time.thread_time()
        puts = step >= self._due and begin_s >= self._paid_s
        if not puts and step != self._compare_at:
            return
        self._tell(meeting)
        snapshot = self._snapshot(step) if puts else None
        now_s = self._clock.now_s()
        if self._behind:
            self._thread = self._thread or Background("polytempo-pace", _nothing)
            meeting.busy = True
            self._thread.do(partial(meeting.meet, snapshot, step == self._compare_at, now_s))
            own_s = time.thread_time() - began_s  # not the time that another program has the processor
            spent_s, meeting.spent_s = meeting.spent_s + own_s, 0.0
            self._paid_s = max(self._paid_s, begin_s) + spent_s / MAX_COST
        else:
            meeting.meet(snapshot, step == self._compare_at, now_s)
            self._tell(meeting)
        if puts:
            self._due, self._compare_at = step + EVERY, step + 1 if meeting.rank == 0 else -1

    def _snapshot(self, step: int) -> PaceSnapshot:
        now_s, busy_s, waited_s, read_s = self.times
        return PaceSnapshot(step, now_s, busy_s, waited_s, read_s)

    def _tell(self, meeting: PaceMeeting) -> None:
        while meeting.found and len(self.told) < _MOST_TOLD:
            row = meeting.found.popleft()
            self.told.append(row)
            self.tell(row)

    def finish(self) -> None:
        """No more steps come: tell the diagnoses that still wait for a cause."""
        meeting, self._meeting = self._meeting, None
        if self._thread is not None:
            self._thread.close()
        if meeting is not None:
            meeting.finish(self._clock.now_s())
            self._tell(meeting)


class PaceMeeting:
    """One rank's part at the board. It may be in another thread than the program.

    `samples`: reads the rank's host; None: no causes are looked for, as in a virtual world. `who`: the rank in
    sentences. `least_lost_s`: see `SlowRankJudge`.
    """

    def __init__(
        self,
        board: PaceBoard,
        rank: int,
        size: int,
        *,
        who: str = "",
        host: str = "",
        samples: Callable[[float], HostSample] | None = None,
        least_lost_s: float = 0.0,
    ) -> None:
        self._board: PaceBoard | None = board
        self.rank, self._size = rank, size
        self._who, self._host, self._samples = who or f"rank {rank}", host, samples
        self.busy = False
        """True while a thread is in it."""
        self.spent_s = 0.0
        """Processor time of the thread since the program last asked."""
        self.found: deque[dict[str, Any]] = deque(maxlen=_MOST_TOLD)
        """Rows about slow ranks, for the program to tell."""
        self.latest: Mapping[int, PaceSnapshot] = {}
        """The snapshots of the last comparison."""
        self._judge = SlowRankJudge(least_lost_s)
        self._before: Mapping[int, PaceSnapshot] = {}
        self._waiting: dict[int, tuple[SlowRank, int, int]] = {}
        """Slow ranks that were asked for the cause, the number of that request, and the windows since then."""
        self._requests, self._sample, self._slower = 0, HostSample(), 0.0
        self._cause: str | None = None
        self._costs: deque[float] = deque(maxlen=_BILLED)
        """Processor seconds of the last meetings."""

    def meet(self, snapshot: PaceSnapshot | None, compares: bool, now_s: float) -> None:
        """Compare all snapshots, then leave one; `now_s`: the program's time."""
        begin_s = time.thread_time()
        board = self._board
        try:
            if board is not None and compares:
                self._compare(board, now_s)
            if board is not None and snapshot is not None:
                self._look_at_host(board)
                named = {"who": self._who, "host": self._host, "requests": self._requests, "cause": self._cause}
                board.put(self.rank, msgspec.structs.replace(snapshot, **named))
        except (RuntimeError, OSError, ValueError):  # the process with the board is gone; the run's exchanges name it
            self._board = None
        self._costs.append(time.thread_time() - begin_s)
        self.spent_s += median(self._costs)
        self.busy = False

    def _look_at_host(self, board: PaceBoard) -> None:
        """Answer a request for a cause: read the host now, and at the next snapshot name the difference."""
        if self._samples is None:
            return
        if self._sample.at_s:
            self._cause = cause_between(self._sample, self._samples(time.monotonic()), self._slower)
            self._sample = HostSample()
            return
        asked = board.asked(self.rank)
        if asked is not None and asked[0] > self._requests:
            self._requests, self._slower = asked
            self._cause, self._sample = None, self._samples(time.monotonic())

    def _compare(self, board: PaceBoard, now_s: float) -> None:
        now = board.read()
        self._tell_causes(now, now_s)
        window = window_between(self._before, now, self._size)
        if window is None:
            self._before = self._before or dict(now)
            return
        self._before = self.latest = dict(now)
        for found in self._judge.take(window):
            if self._samples is None:
                self._say(found, now[found.rank], UNREAD, now_s)
            else:
                board.ask(found.rank, found.slower)
                self._waiting[found.rank] = found, now[found.rank].requests + 1, 0

    def _tell_causes(self, now: Mapping[int, PaceSnapshot], now_s: float) -> None:
        for rank, (found, request, windows) in list(self._waiting.items()):
            last = now[rank]
            self._waiting[rank] = found, request, windows + 1
            answered = last.requests >= request and last.cause is not None
            if answered or windows >= _PATIENCE:
                del self._waiting[rank]
                self._say(found, last, (last.cause or "") if answered else "", now_s)

    def _say(self, found: SlowRank, snapshot: PaceSnapshot, cause: str, now_s: float) -> None:
        self.found.append(slow_row(found, snapshot.who, snapshot.host, cause, now_s))

    def finish(self, now_s: float) -> None:
        """Tell the diagnoses that still wait for a cause."""
        for found, _, _ in self._waiting.values():
            last = self._before[found.rank]
            self._say(found, last, last.cause or "", now_s)
        self._waiting, self._board = {}, None


def _nothing() -> None:
    """The thread leaves nothing to do."""


class MemoryBoard:
    """A board in the memory of all ranks, as in a virtual world."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._snapshots: dict[int, PaceSnapshot] = {}
        self._asked: dict[int, tuple[int, float]] = {}

    def put(self, rank: int, snapshot: PaceSnapshot) -> None:
        """See `PaceBoard`."""
        self._snapshots[rank] = snapshot

    def read(self) -> Mapping[int, PaceSnapshot]:
        """See `PaceBoard`."""
        return self._snapshots if len(self._snapshots) == self._size else {}

    def ask(self, rank: int, slower: float) -> None:
        """See `PaceBoard`."""
        self._asked[rank] = self._asked.get(rank, (0, 0.0))[0] + 1, slower

    def asked(self, rank: int) -> tuple[int, float] | None:
        """See `PaceBoard`."""
        return self._asked.get(rank)
