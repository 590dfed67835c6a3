"""Scheduled programs under the virtual clock: the optimum, the number of updates, and the sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import lgamma
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from polytempo.cluster import ethernet, one_host, slow_host
from polytempo.core import NotFinite, Port
from polytempo.data.scheduled import correlated, correlated_classes, drawn_documents, drawn_ratings
from polytempo.partition.scheduled import SweepReport, factorization, lasso, lda, logistic, performed
from polytempo.partition.scheduled.coordinate_descent import DescentJob
from polytempo.partition.scheduled.lda import pairs
from polytempo.runs.programs.run_schedule import schedule
from polytempo.worlds import VirtualWorld

CORRELATED = correlated(rows=200, columns=600, block=20, correlation=0.9, nonzeros=5, seed=0)


def reports(job: Any, data: Sequence[Any], workers: int = 1, **options: Any) -> Sequence[SweepReport]:
    return schedule(job, data, workers, cluster=one_host(), **options).sweeps


def sets_of(job: Any, data: Sequence[Any], workers: int, sweeps: int) -> list[list[Tensor]]:
    """Each worker's answers from `schedule`, round by round."""

    async def rank(port: Port) -> list[Tensor]:
        begun, sets = await job.begin(port, tuple(data)), []
        plain = begun.schedule

        async def noted() -> Tensor:
            sets.append(await plain())
            return sets[-1]

        begun.schedule = noted
        await performed(port, begun, sweeps=sweeps, tolerance=0)
        return sets

    return [sets or [] for sets in VirtualWorld(one_host(), workers).run(rank).results]


def least(x: Tensor, y: Tensor, l1: float, *, logistic: bool) -> float:
    """The optimum by another algorithm, with a certificate of its own: accelerated proximal gradients and duality."""
    n, steps = len(y), 1 / (torch.linalg.matrix_norm(x, 2) ** 2 / len(y) * (0.25 if logistic else 1.0))
    w = v = torch.zeros(x.shape[1], dtype=torch.float64)
    for k in range(1, 20_000):
        u = x @ v
        slope = y * torch.sigmoid(-y * u) if logistic else y - u
        ahead = v + steps * (x.T @ slope) / n
        new = ahead.sign() * (ahead.abs() - steps * l1).clamp(min=0)
        v = new + (k - 1) / (k + 2) * (new - w) if (v - new) @ (new - w) <= 0 else new
        w = new
        if k % 200 == 0:
            u = x @ w
            slope = y * torch.sigmoid(-y * u) if logistic else y - u
            theta = slope * min(1.0, n * l1 / float((x.T @ slope).abs().max()))
            a = theta.abs()
            entropy = -(torch.xlogy(a, a) + torch.xlogy(1 - a, 1 - a)).mean()
            dual = entropy if logistic else (theta * y - theta.square() / 2).mean()
            loss = torch.log1p(torch.exp(-y * u)).mean() if logistic else (y - u).square().mean() / 2
            primal = loss + l1 * w.abs().sum()
            if primal - dual < 1e-9 * primal:
                return float(primal)
    raise AssertionError("the reference did not converge")


def test_lasso_reaches_the_optimum_however_it_is_cut() -> None:
    data = correlated(rows=300, columns=60, block=5, nonzeros=5)
    best = least(*data, 0.2, logistic=False)
    for cut in ("rows", "columns"):
        last = reports(lasso(l1=0.2, cut=cut), data, workers=3, tolerance=1e-7, sweeps=400)[-1]
        assert 0 <= last.objective - best + 1e-9 <= 1e-6 * best
        assert last.error <= 1e-7  # type: ignore[operator]


def test_logistic_regression_reaches_the_optimum() -> None:
    data = correlated_classes(rows=200, columns=50, block=5, nonzeros=5)
    best = least(*data, 0.05, logistic=True)
    last = reports(logistic(l1=0.05), data, workers=2, tolerance=1e-7, sweeps=400)[-1]
    assert 0 <= last.objective - best + 1e-9 <= 1e-6 * best


def test_no_round_raises_the_objective() -> None:
    """Not even where all columns are alike: the sums of their correlations stay below 1."""
    x, y = correlated(rows=100, columns=60, block=60, correlation=0.085, nonzeros=60)
    objectives = [each.objective for each in reports(lasso(l1=0.01, at_once=60), (x, y), sweeps=40)]
    assert all(after <= before for before, after in pairwise(objectives))


def test_kept_sets_hardly_correlate_and_are_the_same_on_all_workers() -> None:
    each = sets_of(lasso(l1=0.3), CORRELATED, workers=2, sweeps=5)
    assert all(torch.equal(a, b) for a, b in zip(*each, strict=True))
    normed = CORRELATED.x / CORRELATED.x.norm(dim=0)
    for chosen in each[0]:
        assert 1 <= len(chosen) == len(set(chosen.tolist())) <= 32
        correlations = (normed[:, chosen].T @ normed[:, chosen]).abs().fill_diagonal_(0)
        assert correlations.max() < 0.1
        assert correlations.sum(1).max() < 1


@pytest.mark.parametrize("order", ["priority", "last_change", "round_robin", "random"])
def test_unscheduled_updates_of_correlated_columns_diverge(order: str) -> None:
    data = correlated(rows=200, columns=300, block=50, correlation=0.9, nonzeros=30)
    with pytest.raises(NotFinite, match="interfere"):
        reports(lasso(l1=0.1, order=order, bound=None), data, sweeps=300)
    scheduled = reports(lasso(l1=0.1, order=order), data, sweeps=20)
    assert all(after.objective <= before.objective for before, after in pairwise(scheduled))


@pytest.mark.parametrize(
    ("columns", "block", "nonzeros", "l1", "order", "at_most"),
    [
        (1000, 20, 30, 0.1, "last_change", 0.5),
        (1000, 20, 30, 0.1, "priority", 0.6),
        (300, 10, 5, 0.2, "priority", 0.65),
    ],
)
def test_weights_save_updates_of_the_round_robin(
    columns: int, block: int, nonzeros: int, l1: float, order: str, at_most: float
) -> None:
    """The bound is 1e-3 of the optimum, of 500 samples, the median of 5 seeds."""
    data = correlated(rows=500, columns=columns, block=block, correlation=0.9, nonzeros=nonzeros)
    best = reports(lasso(l1=l1), data, sweeps=400, tolerance=3e-5)[-1]
    assert best.error <= 3e-5  # type: ignore[operator]

    def updates(job: DescentJob) -> int:
        each = reports(job, data, sweeps=100, tolerance=0)
        return next(report.updates for report in each if report.objective - best.objective <= 1e-3 * best.objective)

    weighed = [updates(lasso(l1=l1, order=order, seed=seed)) for seed in range(5)]
    assert median(weighed) <= at_most * updates(lasso(l1=l1, order="round_robin")), weighed


def test_the_factorization_finds_a_matrix_of_its_rank() -> None:
    data = drawn_ratings(rows=60, columns=40, entries=1200, rank=2, noise=0.0)
    one = schedule(factorization(rank=2, l2=1e-3), data, 1, cluster=one_host(), tolerance=1e-3, sweeps=200)
    u, v = one.parameters["rows"], one.parameters["columns"]
    assert ((u[data.rows] * v[data.columns]).sum(1) - data.values).square().mean() <= 1e-3 * data.values.var()
    assert all(after.objective <= before.objective for before, after in pairwise(one.sweeps))
    three = schedule(factorization(rank=2, l2=1e-3), data, 3, cluster=one_host(), tolerance=1e-3, sweeps=200)
    assert torch.allclose(u, three.parameters["rows"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_factorization_of_a_whole_matrix_has_the_closed_form(workers: int) -> None:
    """Singular values shrink by λ: σ > λ costs λ² + 2λ(σ - λ), and each that is left out costs σ²."""
    draw, rank, l2 = torch.Generator().manual_seed(3), 3, 0.7
    matrix = 2 * torch.randn(12, 9, dtype=torch.float64, generator=draw)
    data = (torch.arange(12).repeat_interleave(9), torch.arange(9).repeat(12), matrix.flatten(), 12, 9)
    job = factorization(rank=rank, l2=l2)
    found = schedule(job, data, workers, cluster=one_host(), tolerance=1e-14, sweeps=400)
    values = torch.linalg.svdvals(matrix)
    assert values[rank - 1] > l2
    least = (l2**2 + 2 * l2 * (values[:rank] - l2)).sum() + values[rank:].square().sum()
    assert found.sweeps[-1].objective == pytest.approx(float(least), rel=1e-12)


def test_topics_are_drawn_from_the_posterior() -> None:
    """Four words in one document: the mean of -log P(w, z) over sweeps is its mean over all 16 assignments."""
    words, topics, alpha, beta, seed = [0, 0, 1, 2], 2, 0.5, 0.3, 5

    def log_p(z: tuple[int, ...]) -> float:
        found = lgamma(topics * alpha) - lgamma(topics * alpha + len(words))
        for k in range(topics):
            counts = [sum(each == k and w == word for w, each in zip(words, z, strict=True)) for word in range(3)]
            found += lgamma(alpha + z.count(k)) - lgamma(alpha) + lgamma(3 * beta) - lgamma(3 * beta + sum(counts))
            found += sum(lgamma(beta + n) - lgamma(beta) for n in counts)
        return found

    logs = torch.tensor([log_p(z) for z in product(range(topics), repeat=len(words))], dtype=torch.float64)
    each, weights = -logs / len(words), logs.softmax(0)
    mean = float((weights * each).sum())
    spread = float((weights * (each - mean) ** 2).sum()) ** 0.5
    data = (torch.zeros(4, dtype=torch.int64), torch.tensor(words), 1, 3)
    job = lda(topics=topics, alpha=alpha, beta=beta, seed=seed)
    drawn = torch.tensor([sweep.objective for sweep in reports(job, data, sweeps=1000)[50:]], dtype=torch.float64)
    assert float(drawn.mean()) == pytest.approx(mean, abs=4 * spread / len(drawn) ** 0.5), seed


def test_no_word_is_at_two_workers_in_a_round() -> None:
    data = drawn_documents(documents=30, words=40, length=20, topics=3)
    each = sets_of(lda(topics=3), data, workers=3, sweeps=2)
    assert [chosen.tolist() for chosen in each[0]] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]] * 2
    assert all(torch.equal(a, b) for other in each[1:] for a, b in zip(each[0], other, strict=True))


def test_topic_counts_stay_those_of_the_documents() -> None:
    data = drawn_documents(documents=30, words=40, length=20, topics=3)
    fit = schedule(lda(topics=3), data, 3, cluster=one_host(), sweeps=3)
    counts = fit.parameters
    assert torch.equal(counts["word_topics"].sum(1), pairs(data.words, data.words * 0, 40, 1)[:, 0])
    assert torch.equal(counts["document_topics"].sum(1), torch.full((30,), 20))
    assert torch.equal(counts["word_topics"].sum(0), counts["topics"])
    assert torch.equal(counts["document_topics"].sum(0), counts["topics"])


def test_topics_of_several_workers_are_as_likely_as_those_of_one() -> None:
    data = drawn_documents(documents=60, words=150, length=30, topics=2)
    one, two = (
        sum(report.objective for report in reports(lda(topics=2), data, workers, sweeps=40)[-15:]) / 15
        for workers in (1, 2)
    )
    assert two == pytest.approx(one, rel=5e-3)


def test_stragglers_cost_time_and_change_nothing() -> None:
    data = correlated(rows=50, columns=20, block=4, nonzeros=3)
    plain = schedule(lasso(l1=0.1), data, 3, cluster=ethernet(gflops=0.001), sweeps=3)
    slow = schedule(
        lasso(l1=0.1), data, 3, cluster=replace(ethernet(gflops=0.001), stragglers=slow_host(2, 4.0)), sweeps=3
    )
    assert torch.equal(plain.parameters["weights"], slow.parameters["weights"])
    assert slow.last.seconds > 2 * plain.last.seconds
