"""`PaceWatch`: each rank leaves its seconds on a board now and then, and rank 0 names a rank that holds the others up.

rank 3   ── step 30: put ──────────────────────── 33: put, is asked, reads its host ── 36, 39: put, with the cause
rank 0   ── step 30: put ── 31: read all, judge ── 33 ── 34 ── 36 ── 37 ── 39 ── 40: read all ── tell ──▶ a row

No rank waits for another rank, no operation of the world is used, and the run's trace has no line of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, Protocol

import torch

from polytempo.diagnosis.host_sample import HostSample, cause_between
from polytempo.diagnosis.pace import PaceSnapshot, RankTimes, window_between
from polytempo.diagnosis.sentence import slow_row
from polytempo.diagnosis.slow_rank import SlowRank, SlowRankJudge

EVERY = 3
"""Steps between two snapshots, at least."""
MAX_EVERY = 256
MAX_COST = 0.003
"""Bound on the part of a step's time that snapshots take."""
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
    """One rank's part. `board`: None if ranks are not compared, then it only counts.

    `samples`: reads the rank's host; None: no causes are looked for, as in a virtual world. `own_cost`: snapshots take
    real time of steps, so that they are made rarely where steps are short. `least_lost_s`: see `SlowRankJudge`.
    """

    def __init__(
        self,
        board: PaceBoard | None,
        clock: PaceClock,
        rank: int,
        size: int,
        *,
        who: str = "",
        host: str = "",
        samples: Callable[[float], HostSample] | None = None,
        own_cost: bool = False,
        least_lost_s: float = 0.0,
        tell: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> None:
        self._board, self._clock, self._rank, self._size = board, clock, rank, size
        self._who, self._host, self._samples, self._own_cost = who or f"rank {rank}", host, samples, own_cost
        self.tell = tell
        """Takes rows about slow ranks, on rank 0."""
        self.told: list[dict[str, Any]] = []
        """The rows so far, on rank 0."""
        self._judge = SlowRankJudge(least_lost_s)
        self._before: Mapping[int, PaceSnapshot] = {}
        self._waiting: dict[int, tuple[SlowRank, int, int]] = {}
        """Slow ranks that were asked for the cause, the number of that request, and the windows since then."""
        self._due, self._every, self._compare_at = 0, EVERY, -1
        self._put_at, self._spent_s = (0, 0.0), 0.0
        self._read_s = 0.0
        self._asked_s: float | None = None
        self._requests, self._sample, self._slower = 0, HostSample(), 0.0
        self._cause: str | None = None

    @property
    def times(self) -> RankTimes:
        """This rank's totals so far."""
        clock = self._clock
        return RankTimes(clock.now_s(), clock.busy_s(), clock.waited_s(), self._read_s)

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
        """This rank has finished so many steps: leave a snapshot, if it is time."""
        self._asked_s = self._clock.now_s()
        puts = step >= self._due
        if self._board is None or not (puts or step == self._compare_at):
            return
        begin_s = time.perf_counter()
        try:
            self._meet(self._board, step, puts=puts)
        except (RuntimeError, OSError, ValueError):  # the process with the board is gone; the run's exchanges name it
            self._board = None
        if self._own_cost:
            self._set_pace(step, time.perf_counter() - begin_s, puts=puts)
            self._asked_s = self._clock.now_s()
        if puts:
            self._due = step + self._every

    def _meet(self, board: PaceBoard, step: int, *, puts: bool) -> None:
        """Put a snapshot; rank 0 reads all a step later, when ranks that are in step have put theirs."""
        if step == self._compare_at:
            self._compare(board)
        if puts:
            board.put(self._rank, self._snapshot(step))
            self._look_at_host(board)
            self._compare_at = step + 1 if self._rank == 0 else -1

    def _snapshot(self, step: int) -> PaceSnapshot:
        now_s, busy_s, waited_s, read_s = self.times
        return PaceSnapshot(step, now_s, busy_s, waited_s, read_s, self._who, self._host, self._requests, self._cause)

    def _set_pace(self, step: int, spent_s: float, *, puts: bool) -> None:
        """Let snapshots cost at most `MAX_COST` of the steps, by the last ones."""
        self._spent_s += spent_s
        if not puts:
            return
        spent_s, self._spent_s = self._spent_s, 0.0
        before, before_s = self._put_at
        now_s = time.perf_counter()
        self._put_at = step, now_s
        if before_s and step > before:
            affordable = spent_s / (MAX_COST * max(1e-9, (now_s - before_s) / (step - before)))
            middle = self._every + 0.5 * (affordable - self._every) if affordable < self._every else affordable
            self._every = min(MAX_EVERY, max(EVERY, ceil(middle)))

    def _look_at_host(self, board: PaceBoard) -> None:
        """Answer a request for a cause: read the host now, and at the next snapshot name the difference."""
        if self._samples is None:
            return
        if self._sample.at_s:
            self._cause = cause_between(self._sample, self._samples(time.monotonic()), self._slower)
            self._sample = HostSample()
            return
        asked = board.asked(self._rank)
        if asked is not None and asked[0] > self._requests:
            self._requests, self._slower = asked
            self._cause, self._sample = None, self._samples(time.monotonic())

    def _compare(self, board: PaceBoard) -> None:
        now = board.read()
        self._tell_causes(now)
        window = window_between(self._before, now, self._size)
        if window is None:
            self._before = self._before or dict(now)
            return
        self._before = dict(now)
        for found in self._judge.take(window):
            if self._samples is None:
                self._say(found, now[found.rank], "")
            else:
                board.ask(found.rank, found.slower)
                self._waiting[found.rank] = found, now[found.rank].requests + 1, 0

    def _tell_causes(self, now: Mapping[int, PaceSnapshot]) -> None:
        for rank, (found, request, windows) in list(self._waiting.items()):
            last = now[rank]
            self._waiting[rank] = found, request, windows + 1
            answered = last.requests >= request and last.cause is not None
            if answered or windows >= _PATIENCE:
                del self._waiting[rank]
                self._say(found, last, (last.cause or "") if answered else "")

    def _say(self, found: SlowRank, snapshot: PaceSnapshot, cause: str) -> None:
        row = slow_row(found, snapshot.who, snapshot.host, cause, self._clock.now_s())
        if len(self.told) < _MOST_TOLD:
            self.told.append(row)
            self.tell(row)

    def finish(self) -> None:
        """No more steps come: tell the diagnoses that still wait for a cause."""
        for found, _, _ in self._waiting.values():
            last = self._before[found.rank]
            self._say(found, last, last.cause or "")
        self._waiting, self._board = {}, None


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
