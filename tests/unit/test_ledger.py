"""The ledger: once, never (and why) and twice, place by place; and the ranges that it is made of."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytempo.core.arithmetic.ranges import Ranges
from polytempo.data.ledger import NEVER_APPLIED, NEVER_DEALT, Found, Ledger

EDGES = [0, 4, 8, 11]


def told(ledger: Ledger, epoch: int = 0) -> list[str]:
    return str(ledger.verdict(epoch)).split("\n  ")


def test_an_epoch_that_was_used_once() -> None:
    ledger = Ledger(EDGES, num_shards=2)
    for ticket in (2, 0, 1):
        ledger.dealt(ticket)
        ledger.applied(0, ticket)
        ledger.applied(1, ticket)
    verdict = ledger.verdict(0)
    assert verdict.exact
    assert (verdict.once, verdict.never, verdict.twice, verdict.unused, verdict.repeated) == (11, 0, 0, (), ())


def test_an_epoch_in_which_everything_went_wrong() -> None:
    """Ticket 3 came again and shard 0 used it twice; 4 was late at shard 1; 5's second half was never answered."""
    ledger = Ledger(EDGES, num_shards=2)
    for ticket in (3, 4, 3, 5):
        ledger.dealt(ticket)
    for shard, ticket in [(0, 3), (1, 3), (0, 3), (0, 4)]:
        ledger.applied(shard, ticket)
    ledger.refused(1, 3)
    ledger.dropped(1, 4, "late")
    ledger.reassigned(5, (1, 3))
    for shard in (0, 1):
        ledger.applied(shard, 5, (0, 2))
    assert told(ledger, 1) == [
        "epoch 1: 11 samples: 2 used once, 5 never, 4 twice "
        "(tickets dealt again 1, samples reassigned 2, repeats refused 1)",
        f"places 10 to 10 (ticket 5) at shard 0: {NEVER_APPLIED}",
        "places 4 to 7 (ticket 4) at shard 1: late",
        f"places 10 to 10 (ticket 5) at shard 1: {NEVER_APPLIED}",
        "places 0 to 3 (ticket 3) at shard 0: used more than once",
    ]
    assert ledger.epochs == (1,)
    assert not ledger.verdict(1).exact


def test_what_was_never_dealt_is_said() -> None:
    ledger = Ledger(EDGES, num_shards=1)
    ledger.dealt(0)
    ledger.applied(0, 0)
    assert ledger.verdict(0).unused == (Found(4, 10, (1, 2), 0, NEVER_DEALT),)
    assert ledger.verdict(7).never == 11, "an epoch that never began"
    assert ledger.epochs == (0,), "asking opens no page"


def test_a_drop_counts_only_while_the_sample_is_not_used() -> None:
    ledger = Ledger(EDGES, num_shards=1)
    for ticket in range(3):
        ledger.dealt(ticket)
        ledger.dropped(0, ticket, "late")
    ledger.dropped(0, 1, "not a number")
    ledger.applied(0, 0)
    ledger.dropped(0, 0, "had it already")
    assert ledger.verdict(0).unused == (Found(4, 10, (1, 2), 0, "late"),), "the first reason stands"


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: Ledger([0], 1), r"rise from 0 .* got \[0\]"),
        (lambda: Ledger([0, 4, 4], 1), r"rise from 0"),
        (lambda: Ledger([1, 4], 1), r"rise from 0"),
        (lambda: Ledger(EDGES, 0), "at least one shard"),
        (lambda: Ledger(EDGES, 1).applied(1, 0), "shards are 0 to 0, got 1"),
        (lambda: Ledger(EDGES, 1).refused(-1, 0), "got -1"),
        (lambda: Ledger(EDGES, 1).dealt(-1), "tickets count from 0"),
        (lambda: Ledger(EDGES, 1).applied(0, 2, (1, 4)), "samples 0 to 2, and no part 1 to 3"),
        (lambda: Ledger(EDGES, 1).applied(0, 2, (1, 1)), "no part"),
    ],
)
def test_what_cannot_be_is_refused(act: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        act()


@given(seed=st.integers(0, 2**32), shards=st.integers(1, 3))
def test_the_ledger_counts_as_one_would_by_hand(seed: int, shards: int) -> None:
    rng = random.Random(seed)
    edges = [0, *sorted(rng.sample(range(1, 30), rng.randint(1, 6)))]
    ledger = Ledger(edges, shards)
    used: list[Counter[int]] = [Counter() for _ in range(shards)]
    dropped: list[set[int]] = [set() for _ in range(shards)]
    for _ in range(rng.randrange(40)):
        batch, shard = rng.randrange(len(edges) - 1), rng.randrange(shards)
        size = edges[batch + 1] - edges[batch]
        begin = rng.randrange(size)
        part = begin, rng.randint(begin + 1, size)
        places = range(edges[batch] + part[0], edges[batch] + part[1])
        if rng.random() < 0.7:
            ledger.applied(shard, batch, part)
            used[shard].update(places)
        else:
            ledger.dropped(shard, batch, "late", part)
            dropped[shard].update(places)
    verdict = ledger.verdict(0)
    everywhere = [[counts[place] for counts in used] for place in range(edges[-1])]
    assert verdict.once == sum(all(count == 1 for count in counts) for counts in everywhere)
    assert verdict.never == sum(0 in counts for counts in everywhere)
    assert verdict.twice == sum(max(counts) > 1 for counts in everywhere)
    late = {(f.shard, place) for f in verdict.unused if f.reason == "late" for place in range(f.first, f.last + 1)}
    assert late == {(shard, place) for shard in range(shards) for place in dropped[shard] - set(used[shard])}


def test_a_long_epoch_in_any_order_takes_little_memory() -> None:
    """The tickets in flight are out of order; the rest is one range."""
    ledger = Ledger(range(0, 100_001, 10), 1)
    for ticket in range(0, 10_000, 2):
        ledger.applied(0, ticket + 1)
        ledger.applied(0, ticket)
    assert ledger.verdict(0).exact
    assert ledger._pages[0].used[0].tuples == ((0, 99_999),)


# ---- ranges ----


def test_ranges_merge() -> None:
    ranges = Ranges([(0, 3), (6, 8)])
    assert ranges.add(5) == []
    assert ranges.tuples == ((0, 3), (5, 8))
    assert ranges.add(2, 6) == [(2, 3), (5, 6)], "present from the start"
    assert (ranges.tuples, len(ranges)) == (((0, 8),), 9)
    assert Ranges([(4, 4), (0, 3)]) == Ranges([(0, 4)])
    with pytest.raises(ValueError, match="got 3 to 2"):
        ranges.add(3, 2)


@given(
    numbers=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6))),
    window=st.tuples(st.integers(0, 45), st.integers(-1, 9)),
)
def test_ranges_are_a_set(numbers: list[tuple[int, int]], window: tuple[int, int]) -> None:
    ranges, plain = Ranges(), set[int]()
    for first, more in numbers:
        new = set(range(first, first + more + 1))
        assert flat(ranges.add(first, first + more)) == sorted(plain & new)
        plain |= new
    first, last = window[0], window[0] + window[1]
    asked = set(range(first, last + 1))
    assert flat(ranges) == sorted(plain)
    assert flat(ranges.common(first, last)) == sorted(plain & asked)
    assert flat(ranges.missing(first, last)) == sorted(asked - plain)
    assert ranges.covers(first, last) == (asked <= plain)
    assert (len(ranges), first in ranges) == (len(plain), first in plain)
    assert all(a[1] + 1 < b[0] for a, b in zip(ranges.tuples, ranges.tuples[1:], strict=False)), "fewest ranges"


def flat(ranges: Ranges | list[tuple[int, int]]) -> list[int]:
    return [number for first, last in ranges for number in range(first, last + 1)]
