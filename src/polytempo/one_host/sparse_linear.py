"""Sparse logistic regression by Hogwild!: one worker's part, one gradient step a sample.

memory shared by the workers     weights [ … ]   locks [ … ]   turn   gates [ one a worker ]
every epoch                      gate ─▶ own part of the order, native ─▶ gate ─▶ own part of the loss
"""

from __future__ import annotations

import math
import mmap
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from polytempo.core import TimedOut
from polytempo.data import SparseRows
from polytempo.native.kernels.sparse import ATOMIC, FREE, IN_TURN, LOCKED, Access, Problem, RowPart, logistic_epoch
from polytempo.strategies.hogwild import Update

_MODES = {"free": FREE, "atomic": ATOMIC, "locked": LOCKED, "in_turn": IN_TURN}
_WINDOWED = ("free", "atomic")
_LINE = 8
"""Numbers of 8 bytes in a cache line: writes of two workers do not share one."""
_SHORTEST_CHEAP, _EXCHANGES_AN_EPOCH, _MOST_MOVEMENT = 128, 8, 320.0


@dataclass(frozen=True)
class Settings:
    """The arguments of `fit_logistic`; see there."""

    workers: int = 2
    update: Update = "free"
    epochs: int = 20
    lr: float = 0.5
    decay: float = 0.9
    l2: float = 0.0
    window: int | None = None
    seed: int = 0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Raise ValueError for settings out of range."""
        if self.update not in _MODES:
            raise ValueError(f"update must be one of {', '.join(get_args(Update))}, got {self.update!r}")
        for name in ("workers", "epochs", "window"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value > 0) and not (name == "window" and value is None):
                raise ValueError(f"{name} must be a positive whole number, got {value}")
        for name in ("lr", "decay", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 <= self.l2 < math.inf:
            raise ValueError(f"l2 must be finite and not negative, got {self.l2}")
        if self.window is not None and self.update not in _WINDOWED:
            raise ValueError(f"window={self.window}: only {' and '.join(_WINDOWED)} updates have one")


class Shared(NamedTuple):
    """The memory that all workers of a fit share: mapped before they are forked, gone with the last of them."""

    weights: NDArray[np.float32]
    locks: NDArray[np.uint32]
    turn: NDArray[np.uint64]
    gates: NDArray[np.int64]
    """The number of gates that each worker has reached."""


class EpochReport(NamedTuple):
    """A worker's measurements of its epochs."""

    seconds: list[float]
    updates: int
    loss_sums: list[float]
    """Sums over this worker's part of the samples."""


def shared_for(rows: SparseRows, settings: Settings) -> Shared:
    """Zeros for a fit, in memory without a name, so that none stays behind."""
    num_locks = rows.num_columns if settings.update == "locked" else 1
    return Shared(
        _zeros(rows.num_columns, np.float32),
        _zeros(num_locks, np.uint32),
        _zeros(_LINE, np.uint64),
        _zeros(settings.workers * _LINE, np.int64),
    )


def _zeros(count: int, dtype: type[Any]) -> NDArray[Any]:
    memory = mmap.mmap(-1, max(1, count) * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype=dtype, count=count)


def work(
    rank: int, rows: SparseRows, settings: Settings, shared: Shared, lock: AbstractContextManager[object]
) -> EpochReport:
    """Learn from this worker's part of every epoch. Step size γβᵏ in epoch k; the workers meet between epochs."""
    decay = scaled_decay(rows, settings.l2)
    problem = Problem(*rows[:4], decay, shared.weights, shared.locks, shared.turn)
    part = part_of(rank, rows.num_rows, settings)
    access = Access(_MODES[settings.update], window_of(rows, settings), settings.timeout_s, lock)
    seconds: list[float] = []
    loss_sums: list[float] = []
    updates = reached = 0
    for epoch in range(settings.epochs):
        order = np.random.default_rng((settings.seed, epoch)).permutation(rows.num_rows)
        if rank == 0:
            shared.turn[0] = 0
        reached = _meet(rank, reached, settings, shared)
        begin_s = time.perf_counter()
        updates += logistic_epoch(
            problem,
            order,
            part,
            settings.lr * settings.decay**epoch,
            access,
            rank=rank,
        )
        reached = _meet(rank, reached, settings, shared)
        seconds.append(time.perf_counter() - begin_s)
        loss_sums.append(_loss_sum(rank, rows, settings, shared.weights))
    return EpochReport(seconds, updates, loss_sums)


def part_of(rank: int, num_rows: int, settings: Settings) -> RowPart:
    """A worker's positions: one run of them, or every N-th where workers take turns."""
    if settings.update == "in_turn":
        return RowPart(rank, num_rows, settings.workers)
    return RowPart(num_rows * rank // settings.workers, num_rows * (rank + 1) // settings.workers)


def window_of(rows: SparseRows, settings: Settings) -> int:
    """Samples between two exchanges of a worker with the shared weights: the least of

    - 20 d / (entries a sample), or 128: then an exchange, which looks at all d weights, is short compared with
    learning; - an eighth of a worker's samples, so that there are eight exchanges an epoch; - 320 / (N γ g), so that
    the sum of N workers' separate updates does not overshoot. The
      loss's curvature is at most g/4, with g = max_v (1/n) Σᵢ |zᵢᵥ| Σᵤ |zᵢᵤ| (Gershgorin's circles). The 320 is a
      guess from single runs on a9a with two workers: four times as much raised the loss by 2 and 5 %, which is no
      more than it fluctuates there between epochs, and eight times as much by half.
    """
    if settings.window is not None:
        return settings.window
    if settings.update not in _WINDOWED or settings.workers == 1 or not len(rows.columns):
        return 1
    cheap = max(_SHORTEST_CHEAP, 20 * rows.num_columns * rows.num_rows / len(rows.columns))
    often = rows.num_rows / (settings.workers * _EXCHANGES_AN_EPOCH)
    safe = _MOST_MOVEMENT / (settings.workers * settings.lr * max(_circles(rows), 1e-12))
    return max(1, int(min(cheap, often, safe)))


def _circles(rows: SparseRows) -> float:
    sizes = np.abs(rows.values)
    counts = np.diff(rows.starts)
    sums = np.bincount(np.repeat(np.arange(rows.num_rows), counts), weights=sizes, minlength=rows.num_rows)
    return float(np.bincount(rows.columns, weights=sizes * np.repeat(sums, counts)).max()) / rows.num_rows


def scaled_decay(rows: SparseRows, l2: float) -> NDArray[np.float32] | None:
    """λ n/nᵥ for a feature that nᵥ of n samples have: met that often, it decays as λ on every sample would have it."""
    if l2 == 0:
        return None
    counts = np.bincount(rows.columns, minlength=rows.num_columns)
    return np.asarray(l2 * rows.num_rows / np.maximum(counts, 1), np.float32)


def logistic_loss(rows: SparseRows, weights: NDArray[np.float32], l2: float = 0.0) -> float:
    """(1/n) Σᵢ log(1 + exp(-yᵢ zᵢ·w)) + λ/2 ‖w‖²."""
    return _sum_of_losses(rows, weights, 0, rows.num_rows) / rows.num_rows + penalty(weights, l2)


def penalty(weights: NDArray[np.float32], l2: float) -> float:
    """λ/2 ‖w‖²."""
    return 0.5 * l2 * float(np.square(weights, dtype=np.float64).sum())


def _loss_sum(rank: int, rows: SparseRows, settings: Settings, weights: NDArray[np.float32]) -> float:
    """This worker's part of n times the loss."""
    begin, end = (rows.num_rows * r // settings.workers for r in (rank, rank + 1))
    return _sum_of_losses(rows, weights, begin, end) + penalty(weights, settings.l2) * (end - begin)


def _sum_of_losses(rows: SparseRows, weights: NDArray[np.float32], begin: int, end: int) -> float:
    first, last = rows.starts[begin], rows.starts[end]
    products = rows.values[first:last] * weights[rows.columns[first:last]]
    numbers = np.repeat(np.arange(end - begin), np.diff(rows.starts[begin : end + 1]))
    margins = np.bincount(numbers, weights=products, minlength=end - begin)
    return float(np.logaddexp(0.0, -rows.labels[begin:end] * margins).sum())


def _meet(rank: int, reached: int, settings: Settings, shared: Shared) -> int:
    """Wait until all workers have come as far as this one, yielding the core meanwhile."""
    deadline_s = time.monotonic() + settings.timeout_s
    shared.gates[rank * _LINE] = reached + 1
    while shared.gates[::_LINE].min() <= reached:
        if time.monotonic() >= deadline_s:
            raise TimedOut(rank, None, "the end of an epoch", settings.timeout_s)
        os.sched_yield()
    return reached + 1
