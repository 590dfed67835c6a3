"""`GradientArrivals`: a table of arrivals and answers, with the time of each submission."""

from __future__ import annotations

import pytest

from polytempo.horovod.torch import gradient_reduction
from polytempo.horovod.torch.gradient_reduction import GradientArrivals

GROUPS = [[100, 50], [60], [500], [10]]
"""Bytes of five parameters in four groups."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_reduction, "_FIRST_BYTES", 60)
    monkeypatch.setattr(gradient_reduction, "_NEXT_BYTES", 200)


def begun(passes: int = 1, *, overlaps: bool = True) -> GradientArrivals:
    arrivals = GradientArrivals(GROUPS, passes)
    arrivals.begin(passes, overlaps=overlaps)
    return arrivals


def test_groups_are_taken_once_enough_bytes_are_complete_and_the_rest_at_the_end() -> None:
    arrivals = begun()
    story = [
        (4, False, None),  # 10 of 60 bytes
        (2, True, [3, 1]),  # 70: the first time
        (1, False, None),  # its group lacks parameter 0
        (0, False, None),  # 150 of 200
        (3, True, [0, 2]),  # 650
    ]
    for place, enough, taken in story:
        assert arrivals.arrived(place) is enough, place
        if taken is not None:
            assert arrivals.take() == taken
    assert arrivals.under_way
    assert arrivals.take_rest() == []


def test_without_a_spare_core_all_wait_for_the_end() -> None:
    arrivals = begun(overlaps=False)
    assert [arrivals.arrived(place) for place in (4, 3, 2)] == [False] * 3
    assert arrivals.take_rest() == [3, 2, 1, 0], "complete ones first, in the order of completion"
    assert arrivals.take_rest() == []


def test_a_gradient_too_many_is_told() -> None:
    arrivals = begun(passes=2)
    assert not arrivals.under_way
    assert [arrivals.arrived(2) for _ in range(3)] == [False, True, None]
    arrivals.begin(2, overlaps=True)
    assert not arrivals.under_way
    assert arrivals.arrived(2) is False


def test_passes_are_counted_anew_and_what_is_complete_stays_so() -> None:
    arrivals = begun(passes=3)
    assert [arrivals.arrived(place) for place in (4, 0, 0)] == [False] * 3
    arrivals.count_anew(1)
    assert arrivals.arrived(4) is False
    assert arrivals.arrived(4) is None
    arrivals.count_anew(1)
    assert arrivals.arrived(4) is None, "its group is complete"
    assert [arrivals.arrived(place) for place in (0, 1)] == [False, True]
    assert arrivals.take() == [3, 0]
