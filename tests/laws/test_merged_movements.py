"""Laws of merges in the place of the mean of the workers' movements, and of the choice of workers that agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polytempo as pt
from helpers import applied, bundles, normal
from laws.harness import Setting, run
from polytempo import collectives
from polytempo import compression as c
from polytempo import strategies as s
from polytempo.aggregation import Merge, bulyan, krum, median, merged, multi_krum, nearest_to_median, trimmed_mean
from polytempo.core import Strategy
from polytempo.jobs.digits import job
from polytempo.planner.search_space import SearchSpace
from some_cases import examples

LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "the other way": lambda moved: -moved,
    "a thousand times": lambda moved: 1e3 * moved,
    "constant": lambda moved: torch.full_like(moved, 0.3),
    "infinite": lambda moved: torch.full_like(moved, -torch.inf),
    "no numbers": lambda moved: torch.full_like(moved, torch.nan),
}


def against(liars: int, lie: Callable[[Tensor], Tensor], merge: Merge) -> Merge:
    """`merge`, where the last ranks are wrong."""

    def told(buffers: Sequence[Tensor]) -> Tensor:
        honest = len(buffers) - liars
        return merge([*buffers[:honest], *map(lie, buffers[honest:])])

    told.coordinate_wise = False  # type: ignore[attr-defined]
    return told


def mean_of(buffers: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(buffers)).mean(0)


# ---------------------------------------------------------------------- in the place of the mean


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (s.local_sgd, {}),
        (s.diloco, {}),
        (s.diloco, {"codec": c.bf16(), "route": c.all_gather}),
        (s.streaming_diloco, {}),
    ],
    ids=["local_sgd", "diloco", "diloco, bf16", "streaming_diloco"],
)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_all_that_agree_are_the_mean(make: Callable[..., Strategy], more: Any, optimizer: str) -> None:
    ours, _ = run(make(4, merge=nearest_to_median(0), **more), 3, 13, Setting(optimizer))
    plain, _ = run(make(4, **more), 3, 13, Setting(optimizer))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.history, b.history, rtol=1e-12, atol=1e-13)


def test_sixteen_bit_parameters_have_float32_movements() -> None:
    options = {"workers": 3, "steps": 12, "seed": 1, "precision": "bf16"}
    ours = pt.simulate(job, s.diloco(4, merge=nearest_to_median(0)), **options)  # type: ignore[arg-type]
    plain = pt.simulate(job, s.diloco(4, route=collectives.ring), **options)  # type: ignore[arg-type]
    assert ours.loss == pytest.approx(plain.loss, rel=1e-4)


@pytest.mark.parametrize("make", [s.local_sgd, s.diloco, s.streaming_diloco])
@pytest.mark.parametrize(
    ("route", "codec"), [(collectives.ring, None), (c.all_gather, None), (collectives.tree, c.bf16())]
)
def test_a_merge_and_a_route_of_sums_are_refused(make: Callable[..., Strategy], route: Any, codec: Any) -> None:
    with pytest.raises(pt.errors.Incompatible, match=r"PT1730.*merge=median compares.*leave route out"):
        make(route=route, codec=codec, merge=median)


def test_a_merge_is_a_part_of_the_name_and_can_be_typed() -> None:
    strategy = pt.parse_strategy("diloco(period=4, merge=nearest_to_median(wrong=2, kept=3))")
    assert str(pt.parse_strategy(str(strategy))) == str(strategy)
    assert "merge=nearest_to_median(wrong=2, kept=3)" in str(strategy)
    assert "merge" not in str(s.diloco())


# ---------------------------------------------------------------------- wrong workers


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize(("num_ranks", "wrong"), [(3, 1), (5, 2), (8, 3)])
@pytest.mark.parametrize("all_kept", [True, False])
def test_movements_of_wrong_ranks_are_left_out(
    lie: Callable[[Tensor], Tensor], num_ranks: int, wrong: int, all_kept: bool
) -> None:
    """Right movements have a common part, for workers learn the same."""
    rows = [1.0 + 0.2 * row for row in normal(num_ranks, 20)]
    kept = num_ranks - wrong if all_kept else 1
    found = against(wrong, lie, nearest_to_median(wrong, None if all_kept else kept))(rows)
    right = torch.stack(rows[: num_ranks - wrong])
    assert (right.amin(0) - 1e-12 <= found).all()
    assert (found <= right.amax(0) + 1e-12).all()
    if all_kept:
        torch.testing.assert_close(found, right.mean(0))


@settings(max_examples=examples(60))
@given(st.integers(1, 4), st.integers(1, 4), st.floats(-2, 2), st.integers(0, 10**6))
def test_any_lie_leaves_the_answer_as_near_to_the_median_as_a_right_rank(
    wrong: int, more: int, power: float, seed: int
) -> None:
    """A wrong movement that is kept is nearer than a right one that is left out."""
    random = torch.Generator().manual_seed(seed)
    right = torch.randn(wrong + more, 7, dtype=torch.float64, generator=random)
    lies = 10**power * torch.randn(wrong, 7, dtype=torch.float64, generator=random)
    rows = [*lies, *right]
    middle = median(rows)
    assert (middle >= right.amin(0)).all()
    assert (middle <= right.amax(0)).all()
    furthest = (right - middle).norm(dim=1).max()
    assert (nearest_to_median(wrong)(rows) - middle).norm() <= furthest + 1e-12


def test_of_equally_near_ranks_the_lowest_counts() -> None:
    rows = [torch.tensor([value]) for value in (3.0, 1.0, 2.0, 0.0, 4.0)]
    assert float(nearest_to_median(0, kept=2)(rows)) == 2.5  # 2 and, of 3 and 1, rank 0's
    assert float(nearest_to_median(2)(rows)) == 2.0


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_one_wrong_worker_of_five_ruins_diloco_by_the_mean_and_not_by_those_that_agree(
    lie: Callable[[Tensor], Tensor],
) -> None:
    def accuracy(strategy: Strategy) -> float:
        result = pt.simulate(job, strategy, workers=5, epochs=2, batch_size=16, seed=1, allow_nan=True)
        assert result.accuracy is not None
        return result.accuracy

    calm = accuracy(s.diloco(8))
    assert accuracy(s.diloco(8, merge=against(1, lie, nearest_to_median(1)))) > calm - 0.02
    if not lie(torch.ones(1)).abs() <= 1:
        assert accuracy(s.diloco(8, merge=against(1, lie, mean_of))) < 0.4


# ---------------------------------------------------------------------- too few workers


@pytest.mark.parametrize(
    ("strategy", "copies", "least"),
    [
        (s.robust_sgd(krum(1)), 1, 5),
        (s.robust_sgd(trimmed_mean(1), momentum=0.9), 1, 3),
        (s.local_sgd(4, merge=multi_krum(1, kept=4)), 1, 7),
        (s.diloco(40, merge=nearest_to_median(1)), 1, 3),
        (s.diloco(4, codec=c.feedback(c.int8()), merge=nearest_to_median(1, kept=5)), 1, 6),
        (s.streaming_diloco(6, merge=bulyan(0)), 1, 3),
        (s.streaming_diloco(6, delay=0, merge=bulyan(0)), 1, 3),
        (s.sparta(outer=s.diloco(4, merge=nearest_to_median(1))), 1, 3),
        (s.gpipe(2, inner=s.diloco(4, merge=nearest_to_median(1))), 2, 6),
        (s.codistillation(2, inner=s.robust_sgd(krum(1))), 2, 10),
        (s.islands(s.robust_sgd(trimmed_mean(1)), s.local_sgd(4)), 1, 6),
        (s.islands(outer=s.diloco(4, merge=nearest_to_median(1)), number=3), 1, 3),
    ],
    ids=str,
)
def test_too_few_workers_for_a_merge_are_refused_before_the_run(strategy: Strategy, copies: int, least: int) -> None:
    says = rf"merge that needs at least {least} workers, and there are {2 * copies}; use workers={least} or more"
    for start in (pt.run, pt.simulate):
        with pytest.raises(ValueError, match=says):
            start(job, strategy, workers=2 * copies, steps=1)
    with pytest.raises(ValueError, match=says):
        pt.explain(strategy, 2 * copies)
    for enough in (copies, least):
        assert pt.explain(strategy, enough).workers == enough


def test_an_elastic_run_must_not_shrink_below_a_merge() -> None:
    strategy = s.diloco(4, merge=nearest_to_median(2))
    for more in ({"min_workers": 3}, {"min_workers": 1}, {"max_workers": 6}):
        with pytest.raises(ValueError, match="would go on with fewer; use min_workers=5 or more"):
            pt.run(job, strategy, 6, steps=1, **more)  # type: ignore[arg-type]


def test_too_few_islands_and_clients_for_a_merge_are_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 3 islands, and there are 2; use number=3 or more"):
        s.islands(outer=s.diloco(4, merge=nearest_to_median(1)))
    with pytest.raises(ValueError, match=r"krum\(wrong=1\) needs at least 5 clients, and a round of .* has 4"):
        pt.federated.fed_robust(pt.federated.fed_avg(4), krum(1))


def test_a_plan_leaves_out_runs_with_too_few_workers_for_a_merge() -> None:
    runs, left = SearchSpace(("diloco(merge=nearest_to_median)",), (2, 3), (8,)).runs()
    assert [run.workers for run in runs] == [3]
    assert [each.what.rpartition(", ")[2] for each in left] == ["2 workers"]


# ---------------------------------------------------------------------- refused numbers


def test_too_few_ranks_and_too_many_kept_are_refused() -> None:
    with pytest.raises(ValueError, match=r"nearest_to_median\(.*\) needs at least 5 ranks, got 4; lower its numbers"):
        applied(merged(nearest_to_median(2)), bundles(normal(4)))
    with pytest.raises(ValueError, match="needs at least 6 ranks, got 5; lower its numbers or add"):
        nearest_to_median(1, kept=5)(normal(5))
    with pytest.raises(ValueError, match="nearest_to_median keeps at least 1 buffer, got kept=0"):
        nearest_to_median(kept=0)
    with pytest.raises(ValueError, match="wrong must be >= 0, got -1"):
        nearest_to_median(-1)
