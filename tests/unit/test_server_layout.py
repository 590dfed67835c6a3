"""Shards of the flat vector: every element once, sizes nearly equal, and few elements move."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.server.layout import (
    Parameter,
    Span,
    Spans,
    describe,
    flat_index,
    numel_of,
    parameter_parts,
    part,
    place_,
    shard_map,
    with_shard_added,
    with_shard_drained,
)

MODEL = (Parameter("w1", 60), Parameter("b1", 10, group=1), Parameter("w2", 25), Parameter("b2", 5, group=1))
TABLE = (Parameter("head", 7), Parameter("table", 800, row_width=16), Parameter("tail", 93))

models = st.lists(st.integers(1, 400), min_size=1, max_size=12).map(
    lambda sizes: tuple(Parameter(f"p{i}", numel) for i, numel in enumerate(sizes))
)


def total(parameters: tuple[Parameter, ...]) -> int:
    return sum(parameter.numel for parameter in parameters)


def assert_every_element_is_in_one_shard(shards: tuple[Spans, ...], numel: int) -> None:
    spans = sorted(span for spans in shards for span in spans)
    assert spans[0].begin == 0
    assert spans[-1].end == numel
    assert all(left.end == right.begin for left, right in pairwise(spans))
    for of_shard in shards:
        assert list(of_shard) == sorted(of_shard)
        assert all(left.end < right.begin for left, right in pairwise(of_shard)), "neighbours are one range"


def moved(before: tuple[Spans, ...], after: tuple[Spans, ...], numel: int) -> int:
    """Elements that are in another shard than before."""
    owners = []
    for shards in (before, after):
        owner = torch.full((numel,), -1)
        for number, spans in enumerate(shards):
            place_(owner, spans, torch.full((numel_of(spans),), number))
        owners.append(owner)
    return int((owners[0] != owners[1]).sum())


@pytest.mark.parametrize(
    ("parameters", "num_shards", "expected"),
    [
        (MODEL, 1, [(0, 100)]),
        (MODEL, 2, [(0, 50), (50, 100)]),
        (MODEL, 3, [(0, 33), (33, 66), (66, 100)]),
        ((Parameter("a", 49), Parameter("b", 51)), 2, [(0, 49), (49, 100)]),  # a boundary is within 2.5 % of 50
        ((Parameter("a", 48), Parameter("b", 52)), 2, [(0, 50), (50, 100)]),  # this one is too far
        (TABLE, 2, [(0, 455), (455, 900)]),  # rows begin at 7 + 16 k
        (TABLE, 3, [(0, 295), (295, 599), (599, 900)]),
    ],
)
def test_cuts_are_at_boundaries_where_these_are_near(
    parameters: tuple[Parameter, ...], num_shards: int, expected: list[tuple[int, int]]
) -> None:
    assert shard_map(parameters, num_shards) == tuple((Span(*cut),) for cut in expected)


@given(models, st.integers(1, 6))
def test_shards_are_within_five_percent(parameters: tuple[Parameter, ...], num_shards: int) -> None:
    numel = total(parameters)
    if numel < num_shards:
        return
    shards = shard_map(parameters, num_shards)
    assert_every_element_is_in_one_shard(shards, numel)
    assert all(abs(numel_of(spans) - numel / num_shards) <= 0.05 * numel / num_shards + 1 for spans in shards)


@given(models, st.integers(1, 4), st.integers(1, 3))
def test_a_new_shard_takes_an_equal_share_and_nothing_else_moves(
    parameters: tuple[Parameter, ...], num_shards: int, added: int
) -> None:
    numel = total(parameters)
    if numel < 40 * (num_shards + added):
        return
    shards = shard_map(parameters, num_shards)
    for _ in range(added):
        before, shards = shards, with_shard_added(parameters, shards)
        assert_every_element_is_in_one_shard(shards, numel)
        assert moved((*before, ()), shards, numel) == numel_of(shards[-1])
        mean = numel / len(shards)
        assert all(abs(numel_of(spans) - mean) <= 0.15 * mean + len(shards) for spans in shards)


@given(models, st.integers(2, 5), st.data())
def test_what_a_drained_shard_had_is_all_that_moves(
    parameters: tuple[Parameter, ...], num_shards: int, data: st.DataObject
) -> None:
    numel = total(parameters)
    if numel < 40 * num_shards:
        return
    shard = data.draw(st.integers(0, num_shards - 1))
    before = shard_map(parameters, num_shards)
    shards = with_shard_drained(parameters, before, shard)
    assert_every_element_is_in_one_shard(shards, numel)
    assert shards[shard] == ()
    assert moved(before, shards, numel) == numel_of(before[shard])
    mean = numel / (num_shards - 1)
    assert all(abs(numel_of(s) - mean) <= 0.15 * mean + num_shards for i, s in enumerate(shards) if i != shard)


def test_adding_and_draining_as_a_table() -> None:
    shards = shard_map((Parameter("w", 120),), 2)
    added = with_shard_added((Parameter("w", 120),), shards)
    assert added == ((Span(0, 40),), (Span(60, 100),), (Span(40, 60), Span(100, 120)))
    assert with_shard_drained((Parameter("w", 120),), added, 0) == (
        (),
        (Span(0, 20), Span(60, 100)),
        (Span(20, 60), Span(100, 120)),
    )


def test_rows_stay_whole_whatever_moves() -> None:
    shards = with_shard_drained(TABLE, with_shard_added(TABLE, shard_map(TABLE, 3)), 1)
    assert_every_element_is_in_one_shard(shards, 900)
    inside = [edge for spans in shards for span in spans for edge in span if 7 < edge < 807]
    assert inside
    assert {(edge - 7) % 16 for edge in inside} == {0}


def test_more_shards_than_elements_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 elements .* too few for 4 shards"):
        shard_map((Parameter("w", 3),), 4)
    with pytest.raises(ValueError, match="too few for 3 shards"):
        shard_map((Parameter("table", 32, row_width=16),), 3)
    with pytest.raises(ValueError, match="no other can take them over"):
        with_shard_drained(MODEL, shard_map(MODEL, 1), 0)


def test_an_element_has_a_name() -> None:
    assert [describe(MODEL, i) for i in (0, 59, 60, 94, 99)] == ["w1[0]", "w1[59]", "b1[0]", "w2[24]", "b2[4]"]
    with pytest.raises(ValueError, match="ends 1 elements before"):
        describe(MODEL, 100)
    spans = (Span(10, 12), Span(97, 100))
    assert [flat_index(spans, i) for i in range(5)] == [10, 11, 97, 98, 99]


def test_a_shard_has_parts_of_parameters() -> None:
    parts = parameter_parts(MODEL, (Span(50, 62), Span(68, 100)))
    assert [(found.parameter.name, found.begin, found.end) for found in parts] == [
        ("w1", 0, 10),
        ("b1", 10, 12),
        ("b1", 12, 14),
        ("w2", 14, 39),
        ("b2", 39, 44),
    ]


def test_a_part_of_one_range_is_a_view_and_goes_back_where_it_was() -> None:
    flat = torch.arange(100.0)
    assert part(flat, (Span(3, 6),)).data_ptr() == flat[3:].data_ptr()
    spans = (Span(3, 6), Span(90, 92))
    assert part(flat, spans).tolist() == [3, 4, 5, 90, 91]
    assert part(flat, ()).numel() == 0
    back = torch.zeros(100)
    for shard in with_shard_added(MODEL, shard_map(MODEL, 3)):
        place_(back, shard, part(flat, shard))
    assert torch.equal(back, flat)
