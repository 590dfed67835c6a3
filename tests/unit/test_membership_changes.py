"""A coordinator's announcements of members, against a plain model that looks at all of them each time."""

from __future__ import annotations

import random

import pytest

from polytempo.server.coordinator.membership import Membership


class Plain:
    """The same rules, without anything that is remembered to be fast."""

    def __init__(self, waits: bool) -> None:
        self.waits, self.changes = waits, 0
        self.members: dict[int, int] = {}
        self.announced: dict[int, int] = {}
        self.resting: set[int] = set()
        self.admitted: dict[int, int] = {}

    def counts(self, worker: int) -> bool:
        """True if it was announced in its present life, and does not rest."""
        return self.announced.get(worker) == self.members[worker] and worker not in self.resting

    def change(self, resting: set[int], busy: set[int]) -> tuple[list[tuple[int, int]], list[int]] | None:
        """See `Membership.change`."""
        rest = {worker for worker in self.members if worker in resting}
        new = {worker for worker in self.members if worker not in rest and not self.counts(worker)}
        if self.waits and new and busy:
            rest |= {worker for worker in self.members if worker not in busy or worker in new}
        if self.members == self.announced and rest == self.resting:
            return None
        self.changes += 1
        self.admitted = {
            worker: self.admitted[worker] if self.counts(worker) else self.changes
            for worker in self.members
            if worker not in rest
        }
        self.announced, self.resting = dict(self.members), rest
        return sorted(self.members.items()), sorted(rest)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_it_announces_what_a_search_of_all_members_would(seed: int, waits: bool) -> None:
    draw = random.Random(seed)
    fast, plain = Membership(1, waits=waits), Plain(waits)
    lives = [0] * 5
    for step in range(300):
        worker, what = draw.randrange(5), draw.random()
        if what < 0.3:
            lives[worker] += draw.random() < 0.5  # or back in the same life
            fast.join(worker, lives[worker])
            plain.members[worker] = lives[worker]
        elif what < 0.5:
            fast.leave(worker)
            plain.members.pop(worker, None)
        resting, busy = ({w for w in range(5) if draw.random() < share} for share in (0.2, 0.3))
        if draw.random() < 0.7:
            found, expected = fast.change(resting, lambda: busy), plain.change(resting, busy)  # noqa: B023
            assert found == (None if expected is None else tuple(map(tuple, expected))), (seed, step)
        fast.note(0, fast.changes)
        known = [fast.knows(worker) for worker in range(5)]
        assert known == [plain.admitted.get(worker, plain.changes + 1) <= plain.changes for worker in range(5)], (
            seed,
            step,
        )
