"""`IslandMember`: a member of an elastic run of islands, which stays in its island through all groups of ranks.

    inner exchange ──▶ held ──▶ all-gather of places in the island ──▶ optimizer.step()          every step
                                      │
    a member is lost before it:   its island undoes the step
    after it on any other one:    the others of the island finish the step in the next group of ranks

All members of an island know the places of all samples in its steps, so the lost one's count with the next meeting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from polytempo.collectives.islands import inside, islands_of
from polytempo.collectives.on_islands import BetweenIslands, WithinIslands, between_islands, within_islands
from polytempo.core import Port, Strategy, Transform
from polytempo.data.spans import PlaceSpan
from polytempo.synchronization.every import Timed
from polytempo.training.elastic.local_round import LocalRound
from polytempo.training.model.agree import gather_json


def first_islands(hosts: Sequence[int], number: int) -> list[list[int]]:
    """The ranks of each island as a run begins, host by host; each island's in order, so that `dealt` keeps its leader.

    >>> first_islands([0, 1, 0, 1], 2)
    [[0, 2], [1, 3]]
    """
    by_host = sorted(range(len(hosts)), key=lambda rank: hosts[rank])
    return [sorted(by_host[place] for place in places) for places in islands_of(len(hosts), number)]


def dealt(before: Sequence[int | None], hosts: Sequence[int], number: int) -> list[list[int]]:
    """The ranks of each of `number` islands, from each rank's island `before` (None: a newcomer) and host.

    Members stay in their islands. A newcomer joins the smallest island on its host, or one without members; where there
    is neither, the smallest of all.

    >>> dealt([0, 0, 1, None], [0, 0, 0, 0], 2)
    [[0, 1], [2, 3]]
    """
    islands = [[rank for rank, island in enumerate(before) if island == i] for i in range(number)]
    for rank, island in enumerate(before):
        if island is None:
            near = [ranks for ranks in islands if not ranks or hosts[rank] in {hosts[other] for other in ranks}]
            min(near or islands, key=len).append(rank)
    return islands


class IslandMember:
    """One process, in one of `number` islands."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._island: int | None = None
        self._ranks: tuple[tuple[int, ...], ...] = ()
        """The ranks of each island that has some."""
        self.holds = False
        """True if the inner exchange of the step in hand has its whole answer here, and the model has not."""

    async def deal(self, port: Port, stateful: int, own: LocalRound) -> LocalRound | None:
        """Join an island of a new group. Its first `stateful` ranks have the training's state.

        Returns the round after the step that this member holds if its island finishes it; None: it is undone. One
        member of each former island counts the samples of the `own` round. Cost: a text from each rank.
        """
        joins = port.rank >= stateful
        told = await gather_json(port, None if joins else [self._island, asdict(own)])
        before = [None if each is None else each[0] for each in told]
        found = None
        if not joins:
            neighbours = [rank for rank, island in enumerate(before) if island == self._island]
            best = max((told[rank][1] for rank in neighbours), key=lambda each: each["steps"])
            own.counts = neighbours[0] == port.rank
            if best["steps"] > own.steps:
                assert self.holds, (own.steps, best["steps"])
                found = LocalRound(best["steps"], [PlaceSpan(*span) for span in best["spans"]], best["place"])
                found.counts = own.counts
        self.holds = False
        make = partial(dealt, before) if stateful else first_islands
        islands = make(port.hosts, self._number)
        self._island = next(i for i, ranks in enumerate(islands) if port.rank in ranks)
        self._ranks = tuple(tuple(ranks) for ranks in islands if ranks)
        return found

    def fitted(self, strategy: Strategy) -> Strategy:
        """The strategy on the islands of the present group."""
        timed, parts = strategy.parameters.apply, parts_of(strategy)
        assert isinstance(timed, Timed)
        assert parts is not None
        inner, outer = parts
        return replace(
            strategy,
            gradients=within_islands(inner, self._ranks),
            parameters=timed.around(lambda _: between_islands(outer, self._ranks)),
        )

    def inside(self, port: Port) -> Port:
        """The group of this member's island."""
        return inside(port, self._ranks)

    def newcomers(self, stateful: int, rank: int) -> frozenset[int]:
        """The positions in `rank`'s island of newcomers to it; none where its first member is one."""
        ranks = next(ranks for ranks in self._ranks if rank in ranks)
        return frozenset(i for i, each in enumerate(ranks) if each >= stateful) if ranks[0] < stateful else frozenset()

    def numbers(self, size: int) -> list[int]:
        """The island of each of `size` ranks, as a number."""
        return [next(i for i, ranks in enumerate(self._ranks) if rank in ranks) for rank in range(size)]

    async def step(self, port: Port, own: LocalRound, spans: Sequence[PlaceSpan]) -> list[PlaceSpan]:
        """The places of all samples in the island's step, which every member then knows to have its whole answer.

        Its first member counts them. Cost: two all-gathers of a text within the island.
        """
        island = self.inside(port)
        self.holds, own.counts = True, island.rank == 0
        told = await gather_json(island, [list(span) for span in spans])
        return [PlaceSpan(*span) for each in told for span in each]


def parts_of(strategy: Strategy) -> tuple[Transform, Transform] | None:
    """The transforms within islands and, once in a period, between them; None for another strategy."""
    within, timed = strategy.gradients.apply, strategy.parameters.apply
    between = timed.transform.apply if isinstance(timed, Timed) else None
    if not isinstance(within, WithinIslands) or not isinstance(between, BetweenIslands):
        return None
    return within.transform, between.transform


def island_member(strategy: Strategy) -> IslandMember | None:
    """A member for a strategy of islands; None for another one."""
    within = strategy.gradients.apply
    if parts_of(strategy) is None or not isinstance(within, WithinIslands):
        return None
    return IslandMember(within.number if isinstance(within.number, int) else len(within.number))
