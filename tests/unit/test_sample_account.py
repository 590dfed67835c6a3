"""The account of an epoch's samples closes exactly where each counted once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from polytempo.data.sample_account import SampleAccount, SamplesLost, counted_of

SAMPLES = 103


def test_parts_in_any_order_add_up_to_the_epoch() -> None:
    account = SampleAccount(SAMPLES)
    for places in (range(40, 103), range(7, 40), range(7)):
        account.add({0: counted_of(places)})
    account.check(0, SAMPLES)
    account.check(1, 0)


@pytest.mark.parametrize(
    ("used", "complaint"),
    [
        ([range(50)], "103 samples exactly once, and used 50"),
        ([range(103), range(5, 6)], "103 samples exactly once, and used 104"),
        ([range(50), range(49, 102)], "used 103, some of them twice and others never"),
    ],
)
def test_what_was_left_out_or_used_twice_is_said(used: list[range], complaint: str) -> None:
    account = SampleAccount(SAMPLES)
    for places in used:
        account.add({0: counted_of(places)})
    with pytest.raises(SamplesLost, match=complaint):
        account.check(1, 0)


def test_a_part_of_an_epoch_is_checked_up_to_where_it_stands() -> None:
    account = SampleAccount(SAMPLES)
    account.begin_at(2, 10)
    account.add({2: counted_of(range(10, 20))})
    account.check(2, 20)
    with pytest.raises(SamplesLost, match="epoch 2 should have used 30"):
        account.check(2, 30)


def test_it_travels_as_json_takes_it() -> None:
    account, other = SampleAccount(SAMPLES), SampleAccount(SAMPLES)
    account.begin_at(1, 3)
    other.load_plain(account.to_plain())
    other.check(1, 3)


def test_no_places_count_nothing() -> None:
    assert counted_of(range(5, 5)) == (0, 0)


def test_an_epoch_of_many_blocks_adds_up_from_any_parts() -> None:
    """Borders within, at and across blocks of 2**14 places."""
    borders = [0, 5, 1 << 14, (1 << 14) + 1, 3 << 14, 100_000]
    parts = [counted_of(range(*each)) for each in pairwise(borders)]
    assert sum(parts[1:], parts[0]) == counted_of(range(100_000))
    assert counted_of(range(10**9, 10**9 + 3)).samples == 3
