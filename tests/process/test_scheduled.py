"""Scheduled programs on real processes: the bits of the virtual world, real data, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import polytempo as pt
from polytempo.data import scheduled as data
from polytempo.partition.scheduled import factorization, lasso, lda, logistic
from polytempo.report.status.live_status import read_status
from polytempo.report.status.rows import read_metrics

pytestmark = pytest.mark.process

SAMPLES = data.correlated(rows=60, columns=40, block=5, nonzeros=4)
CLASSES = data.correlated_classes(rows=60, columns=40, block=5, nonzeros=4)
RATINGS = data.drawn_ratings(rows=30, columns=20, entries=200, rank=2)
DOCUMENTS = data.drawn_documents(documents=20, words=30, length=15, topics=3)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("program", "given"),
    [
        (lasso(l1=0.05), SAMPLES),
        (lasso(l1=0.05, cut="columns", order="round_robin"), SAMPLES),
        (logistic(l1=0.02), CLASSES),
        (factorization(rank=2), RATINGS),
        (lda(topics=3), DOCUMENTS),
    ],
    ids=["lasso", "lasso-columns", "logistic", "factorization", "lda"],
)
def test_both_worlds_reach_the_same_bits(program: Any, given: Sequence[object], workers: int) -> None:
    real = pt.schedule(program, given, workers, sweeps=4, tolerance=0)
    virtual = pt.schedule(program, given, workers, sweeps=4, tolerance=0, cluster=pt.cluster.ethernet())
    assert real.parameters.keys() == virtual.parameters.keys()
    assert all(torch.equal(real.parameters[name], virtual.parameters[name]) for name in real.parameters)
    assert [each._replace(seconds=0) for each in real.sweeps] == [each._replace(seconds=0) for each in virtual.sweeps]
    assert real.bytes_sent_per_rank == virtual.bytes_sent_per_rank
    assert (real.bytes_sent_per_rank > 0) == (workers > 1)


def test_a_run_with_a_folder_leaves_its_sweeps_and_logs_there(tmp_path: Path) -> None:
    fit = pt.schedule(lasso(l1=0.05), SAMPLES, 2, sweeps=3, tolerance=0, out=tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert [row["loss"] for row in rows] == [sweep.objective for sweep in fit.sweeps]
    assert (status := read_status(tmp_path / "run")) is not None
    assert (status.strategy, status.state, status.workers) == ("schedule", "finished", 2)
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


def test_what_has_no_bound_is_named() -> None:
    unscheduled = lasso(l1=0.05, order="random", bound=None)
    with pytest.raises(pt.errors.NotFinite, match=r"step \d+: the objective is \w+, the updates of a round"):
        pt.schedule(unscheduled, data.correlated(rows=60, columns=90, block=30, nonzeros=4), 2, sweeps=300)


@pytest.mark.parametrize("program", ["housing", "a9a", "factorization", "lda"])
def test_real_data(program: str, data_root: Path) -> None:
    """Two workers, some sweeps."""
    text = str(data_root / "tinyshakespeare/input.txt")
    if program == "housing":
        samples = data.table(str(data_root / "california-housing/housing.csv"), "median_house_value")
        fit = pt.schedule(lasso(l1=0.05), samples, sweeps=600, tolerance=1e-6)
        assert fit.last.error is not None
        assert fit.last.error <= 1e-6
        assert fit.last.objective < 0.28  # half the squared error in units of the variance, and the penalty
    elif program == "a9a":
        fit = pt.schedule(logistic(l1=1e-3), data.classes(str(data_root / "a9a/a9a.t")), sweeps=100)
        assert fit.last.objective < 0.36
    elif program == "factorization":
        fit = pt.schedule(factorization(rank=5, l2=1.0), data.word_counts(text), sweeps=5)
        assert fit.last.objective < 0.5 * fit.sweeps[0].objective
    else:
        fit = pt.schedule(lda(topics=10), data.scenes(text, least=20), sweeps=3)
        assert fit.last.objective < fit.sweeps[1].objective < fit.sweeps[0].objective
