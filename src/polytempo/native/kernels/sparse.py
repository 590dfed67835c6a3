"""Sparse updates of shared weights: the Python interface of `native/sparse.cpp`, and its twins in torch and numpy."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polytempo.core import TimedOut
from polytempo.native.call import DTYPES
from polytempo.native.library import load, why_not

FREE, LOCKED, IN_TURN, ATOMIC = 0, 1, 2, 3
ADDED = (torch.float32, torch.float64)
"""The dtypes of `scatter_add_`."""
_WAITED_FOR = "an update of shared weights"
_LATE, _MISMATCH, _NO_MEMORY = 2, 3, 5

Floats = NDArray[np.float32]


def scatter_add_(table: Tensor, rows: Tensor, values: Tensor, scale: float, *, atomic: bool = False) -> None:
    """table[rows[i]] += scale · values[i] for every i, also where a row occurs several times.

    Shapes: table (num_rows, …) contiguous float32 or float64, rows (count,) int64, values (count, …). With the native
    core each element is one load and one store, in the order of i, so processes may do this to one table at the same
    time, and of two additions to one element at the same moment one may be lost; with `atomic` none is. Without the
    core torch's `index_add_` does the same for one process, and `atomic` is refused.
    Errors: IndexError where a row is not in the table (then nothing was added), ValueError for other tables.
    """
    if table.dtype not in ADDED or not table.is_contiguous():
        raise ValueError(f"scatter_add_ needs a contiguous table of float32 or float64, got {table.dtype}")
    rows, values = rows.to(torch.int64).contiguous(), values.to(table.dtype).contiguous()
    library = load()
    if library is None:
        if atomic:
            raise ValueError(f"atomic additions need the native core: {why_not()}")
        table.index_add_(0, rows, values, alpha=scale)
        return
    width = table[0].numel() if len(table) else 1
    if values.numel() != len(rows) * width:
        raise ValueError(f"{len(rows)} rows of {width} need as many values, got {tuple(values.shape)}")
    status = library.pt_scatter_add(
        *(DTYPES[table.dtype], table.data_ptr(), len(table), width, rows.data_ptr(), values.data_ptr(), len(rows)),
        *(scale, atomic),
    )
    if status == _MISMATCH:
        raise IndexError(f"rows run from 0 to {len(table) - 1}, got {int(rows.min())} to {int(rows.max())}")


class Problem(NamedTuple):
    """Rows to learn from, and the weights that all workers share."""

    starts: NDArray[np.int64]
    """Row r has the entries starts[r] to starts[r + 1] - 1."""
    columns: NDArray[np.int32]
    values: Floats
    labels: Floats
    """+1 or -1."""
    decay: Floats | None
    """The decay of each column: the gradient's addition for a weight of 1."""
    weights: Floats
    locks: NDArray[np.uint32]
    """A word for each column, 0 at the beginning."""
    turn: NDArray[np.uint64]
    """One number: the position of the next update."""


class RowPart(NamedTuple):
    """A worker's positions in an order: range(begin, end, stride)."""

    begin: int
    end: int
    stride: int = 1


class Access(NamedTuple):
    """A worker's way of writing to the shared weights.

    FREE writes without locks, a `window` of rows at a time; ATOMIC does so and loses no addition; LOCKED locks the
    row's columns (without the native core both lock everything, by `lock`); IN_TURN waits until position - 1 is
    written. A lock or a turn comes within `timeout_s`.
    """

    update: int = FREE
    window: int = 1
    timeout_s: float = 60.0
    lock: AbstractContextManager[object] | None = None


class _Problem(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in Problem._fields],
        ("num_columns", ctypes.c_int64),
    ]


def logistic_epoch(
    problem: Problem,
    order: NDArray[np.int64],
    part: RowPart,
    step_size: float,
    access: Access | None = None,
    *,
    rank: int = 0,
) -> int:
    """One worker's pass over its part of `order`, a gradient step a row; returns how many steps it took.

    For row z with label y, on the row's columns v:  wᵥ ← wᵥ - γ (-y σ(-y z·w) zᵥ + decayᵥ wᵥ).
    Errors: TimedOut, which names `rank`, where a lock or a turn does not come in time.
    """
    library, access = load(), access or Access()
    if library is None:
        return _twin_epoch(problem, order, part, step_size, access, rank)
    addresses = [None if array is None else array.ctypes.data for array in problem]
    native = _Problem(*addresses, len(problem.weights))
    updates = ctypes.c_int64()
    status = library.pt_logistic_epoch(
        ctypes.byref(native),
        order.ctypes.data,
        *part,
        step_size,
        access.update,
        access.window,
        access.timeout_s,
        ctypes.byref(updates),
    )
    if status == _LATE:
        raise TimedOut(rank, None, _WAITED_FOR, access.timeout_s)
    if status == _NO_MEMORY:
        raise MemoryError(f"no memory for a worker's own {8 * len(problem.weights)} bytes of weights; use window=1")
    return updates.value


def _twin_epoch(
    problem: Problem, order: NDArray[np.int64], part: RowPart, step_size: float, access: Access, rank: int
) -> int:
    update, lock = access.update, access.lock
    step, positions = np.float32(step_size), range(*part)
    for position in positions:
        columns, gradient = _gradient(problem, int(order[position]))
        if update == IN_TURN and not _came(problem.turn, position, access.timeout_s):
            raise TimedOut(rank, None, _WAITED_FOR, access.timeout_s)
        with lock if update in (LOCKED, ATOMIC) and lock is not None else nullcontext():
            for column, value in zip(columns, gradient, strict=True):
                decay = np.float32(0) if problem.decay is None else problem.decay[column]
                problem.weights[column] -= step * (value + decay * problem.weights[column])
        if update == IN_TURN:
            problem.turn[0] = position + 1
    return len(positions)


def _gradient(problem: Problem, row: int) -> tuple[NDArray[np.int32], Floats]:
    """The columns of a row, and the loss's derivative at each of its entries."""
    entries = slice(problem.starts[row], problem.starts[row + 1])
    columns, values, label = problem.columns[entries], problem.values[entries], problem.labels[row]
    with np.errstate(over="ignore"):
        slope = -label / (np.float32(1) + np.exp(label * np.dot(values, problem.weights[columns])))
    return columns, np.asarray(slope * values, np.float32)


def _came(turn: NDArray[np.uint64], position: int, timeout_s: float) -> bool:
    """Wait until it is the turn of `position`, yielding the core meanwhile. False: the turn did not come in time."""
    deadline_s = time.monotonic() + timeout_s
    while int(turn[0]) != position:
        if time.monotonic() >= deadline_s:
            return False
        os.sched_yield()
    return True
