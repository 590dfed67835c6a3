"""The workers that a shard serves and counts, after any changes, and the reported changes."""

from __future__ import annotations

from random import Random

import pytest

from polytempo.server.shard.roster import Roster


@pytest.mark.parametrize("seed", range(30))
def test_the_roster_is_that_of_the_last_message_after_any_changes(seed: int) -> None:
    """Workers come, go, come back in a new life and rest; messages may repeat the members, or tell of a stranger."""
    random, roster, lives = Random(seed), Roster(), dict[int, int]()
    counted: set[int] = set()
    for _ in range(40):
        for worker in random.sample(range(9), random.choice([0, 0, 1, 3])):
            if random.random() < 0.4:
                lives.pop(worker, None)
            else:
                lives[worker] = random.randrange(1, 4)
        resting = tuple(sorted(random.sample(range(9), random.randrange(5))))
        for change, worker in roster.change(tuple(sorted(lives.items())), resting):
            if change == "counted":
                counted.add(worker)
            if change == "uncounted":
                counted.remove(worker)
            assert sorted(counted) == list(roster.counted)
        assert roster.members == lives
        assert list(roster.members) == sorted(lives)
        assert list(roster.counted) == sorted(lives.keys() - set(resting))


def test_nobody_is_counted_twice_by_a_repeated_message() -> None:
    roster, members = Roster(), ((0, 1), (1, 1))
    assert list(roster.change(members, (1,))) == [("added", 0), ("added", 1), ("counted", 0)]
    assert list(roster.change(members, (1,))) == []
    assert list(roster.change(members, ())) == [("counted", 1)]
    assert list(roster.change(((1, 1),), ())) == [("removed", 0), ("uncounted", 0)]


def test_a_restored_roster_knows_who_rests() -> None:
    roster = Roster({0: 1, 1: 1}, (0,))
    assert list(roster.change(((0, 1), (1, 1)), (1,))) == []
    assert list(roster.change(((0, 1), (1, 1)), ())) == [("counted", 1)]
