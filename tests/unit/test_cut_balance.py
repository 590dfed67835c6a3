"""Cuts of a chain: the dynamic program against all cuts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polytempo.partition.chain import SegmentBytes, prefix, slowest_least, total_least
from some_cases import examples

Ends = tuple[int, ...]


def all_cuts(units: int, stages: int) -> list[Ends]:
    return [(0, *inner, units) for inner in combinations(range(1, units), stages - 1)]


def most(cost: Tensor, ends: Ends) -> float:
    return max(float(cost[a, b]) for a, b in pairwise(ends))


def total(cost: Tensor, ends: Ends) -> float:
    return sum(float(cost[a, b]) for a, b in pairwise(ends))


@st.composite
def chains(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Whole-numbered loads, tensors with their users, which segments are allowed, and a number of stages."""
    loads = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))
    units = len(loads)
    received = SegmentBytes(units)
    for source in range(units):
        uses = draw(st.sets(st.integers(source, units - 1), max_size=3))
        received.add(draw(st.integers(1, 9)), uses, after=source)
    allowed = torch.tensor(draw(st.lists(st.sampled_from([True, True, False]), min_size=64, max_size=64))).view(8, 8)
    return prefix(loads), received.matrix(), allowed[: units + 1, : units + 1], draw(st.integers(1, units))


def check(found: Ends | None, cuts: list[Ends], rank: Callable[[Ends], tuple[float, float]]) -> None:
    assert (found is None) == (not cuts)
    if found is not None:
        assert found in cuts
        assert rank(found) == min(map(rank, cuts))


@settings(max_examples=examples(60), deadline=None)
@given(chains())
def test_no_other_cut_is_better(chain: tuple[Tensor, Tensor, Tensor, int]) -> None:
    loads, traffic, allowed, stages = chain
    cuts = [ends for ends in all_cuts(len(loads) - 1, stages) if all(allowed[a, b] for a, b in pairwise(ends))]
    slowest = slowest_least(loads, traffic, allowed, stages)
    check(slowest, cuts, lambda ends: (most(loads, ends), total(traffic, ends)))
    least = total_least(traffic, loads, allowed, stages)
    check(least, cuts, lambda ends: (total(traffic, ends), most(loads, ends)))


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 5), st.sets(st.integers(0, 5)), st.integers(0, 6)), max_size=4))
def test_a_segment_has_a_tensor_once(tensors: list[tuple[int, set[int], int]]) -> None:
    counted = SegmentBytes(6)
    for after, uses, until in tensors:
        counted.add(10, uses, after=after, until=until)
    for a in range(7):
        for b in range(a + 1, 7):
            there = [after < a <= until and any(a <= use < b for use in uses) for after, uses, until in tensors]
            assert counted.matrix()[a, b] == 10 * sum(there)


def test_a_known_chain() -> None:
    """Loads 4 1 1 1 4 in two stages: 6 and 5, cut where less is sent; in three 4, 3, 4."""
    loads = prefix([4, 1, 1, 1, 4])
    sent = SegmentBytes(5)
    for source, size in enumerate([10, 10, 5, 10]):
        sent.add(size, [source + 1], after=source)
    everything = torch.ones(6, 6, dtype=torch.bool)
    assert slowest_least(loads, sent.matrix(), everything, 2) == (0, 3, 5)
    assert slowest_least(loads, sent.matrix(), everything, 3) == (0, 1, 4, 5)
    assert total_least(sent.matrix(), loads, everything, 2) == (0, 3, 5)
