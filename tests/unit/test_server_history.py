"""A shard's entries, from the records of its copies: the stories of chains, as tables."""

from __future__ import annotations

import pytest

from polytempo.server.record import Entry, History, PullEntry, Record, history


def entry(name: int) -> Entry:
    """An entry that can be told from others."""
    return PullEntry(0, 1, name, 0, -1, 0)


def record(node: int, first: int, names: list[int], torn: bool = False) -> Record:
    """The record of `node` from entry number `first` on."""
    return Record("shard 0", [entry(name) for name in names], torn, node, first)


ONE = record(4, 1, [1, 2, 3])

STORIES: dict[str, tuple[list[Record], set[int], list[int], bool]] = {
    "one copy": ([ONE], set(), [1, 2, 3], True),
    "two copies, both whole": ([ONE, record(5, 1, [1, 2, 3])], set(), [1, 2, 3], True),
    "the tail died": ([record(4, 1, [1, 2, 3, 4]), record(5, 1, [1, 2])], {5}, [1, 2, 3, 4], True),
    "the head died with an entry of its own": (
        [record(4, 1, [1, 2, 90, 91, 92]), record(5, 1, [1, 2, 3, 4])],
        {4},
        [1, 2, 3, 4],
        True,
    ),
    "copy after copy, with the first ones' entries": (
        [record(4, 1, [1, 2, 3]), record(5, 1, [1, 2, 3, 4, 5]), record(9, 4, [4, 5, 6])],
        {4, 5},
        [1, 2, 3, 4, 5, 6],
        True,
    ),
    "a gap between dead copies": ([record(4, 1, [1, 2]), record(9, 4, [4, 5])], {4}, [1, 2], False),
    "all are lost, and the last line was torn": ([record(4, 1, [1, 2], torn=True)], {4}, [1, 2], False),
    "nothing was recorded": ([], set(), [], True),
}


@pytest.mark.parametrize("story", STORIES)
def test_history(story: str) -> None:
    records, lost, names, whole = STORIES[story]
    assert history(records, 0, lost) == History(0, [entry(name) for name in names], whole)


def test_a_resumed_run_begins_behind_its_snapshot() -> None:
    assert history([record(4, 8, [8, 9])], 7, set()) == History(7, [entry(8), entry(9)], whole=True)
