"""While a simulation runs, garbage is collected rarely; afterwards the collector is as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from polytempo.worlds.virtual.rare_collection import collecting_rarely


def many() -> list[list[int]]:
    """More objects than the collector is to look through."""
    return [[] for _ in range(200_000)]


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen inside; the objects frozen by the tests' set-up are frozen again afterwards."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_a_program_froze_stays_frozen() -> None:
    gc.freeze()
    with collecting_rarely():
        held = many()
        assert gc.get_count()[0] > len(held) // 2
    assert gc.get_freeze_count() > 0


@pytest.mark.usefixtures("thawed")
def test_many_new_objects_count_as_old_without_a_look_at_them() -> None:
    gc.collect(1)  # so the next look would leave them in the second of three generations
    with collecting_rarely():
        held = many()
    assert id(held[-1]) in map(id, gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0


def test_after_few_new_objects_the_frozen_ones_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted() -> int:
        raise AssertionError("that takes 70 ms where 675,000 objects are frozen")

    monkeypatch.setattr(gc, "get_freeze_count", counted)
    gc.collect(0)
    before = gc.get_threshold()
    with collecting_rarely():
        assert gc.get_threshold() > before
    assert gc.get_threshold() == before
