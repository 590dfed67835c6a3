"""`fit_logistic`: sparse logistic regression by Hogwild! on the cores of this host."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polytempo.data import SparseRows
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.one_host.sparse_linear import EpochReport, Settings, shared_for, work


@dataclass(frozen=True)
class LinearFit:
    """The answer of `fit_logistic`."""

    weights: NDArray[np.float32]
    """Shape (num_columns,)."""
    losses: list[float]
    """The loss on all samples after each epoch."""
    seconds: list[float]
    """Seconds of training in each epoch, until the last worker was done."""
    updates: int
    samples_per_s: float
    """The rate of the median epoch."""


def fit_logistic(rows: SparseRows, settings: Settings | None = None, **more: Any) -> LinearFit:
    """Minimise (1/n) Σᵢ log(1 + exp(-yᵢ zᵢ·w)) + λ/2 ‖w‖² by one gradient step a sample, with workers in parallel.

        rows = polytempo.data.rows.random_rows(2_000, 500)
        fit = fit_logistic(rows, workers=2, epochs=5)

    Every epoch the samples are dealt in a new order, the step size is `lr` · `decay`ᵏ, and the workers, which are
    processes, share one vector of weights in memory. `update`: "free" is Hogwild!, without locks, where of two
    additions to one weight at the same moment one may be lost; "atomic" loses none, as the paper assumes; "locked"
    locks the features of a sample while they are written (AIG); "in_turn" writes in the order of the samples. One
    worker is serial gradient descent by the same code. λ is `l2`: a sample decays only its own features, by n/nᵥ times
    as much for a feature that nᵥ samples have.

    `window`: the number of samples that a free or atomic worker learns from, on weights of its own, before it adds its
    changes to the shared weights and reads them. With 1 every update is written immediately, as in the paper; but
    learning from a sample takes less time than a cache line needs between two cores, so it gains little. None chooses a
    window (`window_of`), and 1 for one worker.

    Cost: an update touches only the sample's features; memory 4 bytes a feature, and 8 more a worker where it has a
    window. Deviations from the paper: the window; and samples are dealt without repetition, as in its experiments.
    Errors: `ValueError` for impossible settings and rows, `WorkerDied` where a worker fails.

    Source: B. Recht, C. Re, S. Wright and F. Niu, "Hogwild!: a lock-free approach to parallelizing stochastic gradient
    descent", 2011.
    """
    settings = replace(settings or Settings(), **more)
    _check(rows)
    shared = shared_for(rows, settings)
    lock = multiprocessing.get_context("fork").Lock()

    def serve(rank_info: RankInfo) -> list[Any]:
        return list(work(rank_info.rank, rows, settings, shared, lock))

    reports = [EpochReport(*answer) for answer in launch(serve, settings.workers, threads=1)]
    seconds = [max(each) for each in zip(*(report.seconds for report in reports), strict=True)]
    losses = [sum(each) / rows.num_rows for each in zip(*(report.loss_sums for report in reports), strict=True)]
    updates = sum(report.updates for report in reports)
    return LinearFit(shared.weights.copy(), losses, seconds, updates, rows.num_rows / float(np.median(seconds)))


def _check(rows: SparseRows) -> None:
    """Native code follows these numbers without looking."""
    if not rows.num_rows or len(rows.starts) != rows.num_rows + 1:
        raise ValueError(f"{rows.num_rows} labels need at least one row, and one start more, got {len(rows.starts)}")
    counts = np.diff(rows.starts)
    if rows.starts[0] != 0 or (counts < 0).any() or rows.starts[-1] != len(rows.columns):
        raise ValueError(f"starts must rise from 0 to the {len(rows.columns)} entries")
    if len(rows.columns) != len(rows.values):
        raise ValueError(f"{len(rows.columns)} columns need as many values, got {len(rows.values)}")
    if len(rows.columns) and not 0 <= rows.columns.min() <= rows.columns.max() < rows.num_columns:
        raise ValueError(f"columns must be from 0 to {rows.num_columns - 1}, got up to {rows.columns.max()}")
    first_of_row = np.zeros(len(rows.columns), dtype=bool)
    first_of_row[rows.starts[:-1][counts > 0]] = True
    if (np.diff(rows.columns)[~first_of_row[1:]] <= 0).any():
        raise ValueError("columns must rise within a row, without repetition; sort the entries and add up equal ones")
    for name, dtype in (("starts", "int64"), ("columns", "int32"), ("values", "float32"), ("labels", "float32")):
        array = getattr(rows, name)
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be a contiguous array of {dtype}, got {array.dtype}")
    if not np.isin(rows.labels, (-1, 1)).all():
        raise ValueError("labels must be -1 or 1")
