"""Members of islands stay in them; each island finishes or undoes its own step."""

from __future__ import annotations

import pytest
import torch

import polytempo as pt
from laws.harness import HOST
from polytempo import aggregation
from polytempo.collectives.islands import inside
from polytempo.core import Port, Strategy
from polytempo.data.spans import PlaceSpan
from polytempo.synchronization import every
from polytempo.synchronization.every import after
from polytempo.training.elastic.elastic_state import handed_over_by_islands
from polytempo.training.elastic.elastic_strategies import check_elastic
from polytempo.training.elastic.island_member import IslandMember, dealt, first_islands, island_member, parts_of
from polytempo.training.elastic.local_round import LocalRound
from polytempo.worlds import VirtualWorld


@pytest.mark.parametrize(
    ("before", "hosts", "number", "islands"),
    [
        ([0, 0, 1, 1], [0, 0, 0, 0], 2, [[0, 1], [2, 3]]),
        ([1, 1, 0], [0, 0, 0], 2, [[2], [0, 1]]),
        ([0, 1, 1, None, None], [0, 0, 0, 0, 0], 2, [[0, 3, 4], [1, 2]]),
        ([1, 1], [0, 0], 2, [[], [0, 1]]),
        ([1, 1, None], [0, 0, 0], 2, [[2], [0, 1]]),
        ([0, 0, 1, None], [0, 0, 1, 0], 2, [[0, 1, 3], [2]]),
        ([0, 0, 1, None], [0, 0, 1, 2], 2, [[0, 1], [2, 3]]),
        ([0, 0, 0, None, None], [0, 0, 0, 0, 0], 3, [[0, 1, 2], [3], [4]]),
    ],
    ids=[
        "all stay",
        "in any order",
        "newcomers join the smaller one",
        "an island without members is gone",
        "a newcomer makes it again",
        "a newcomer joins the one on its host",
        "on a host of its own it joins the smallest",
        "newcomers make two again",
    ],
)
def test_islands_of_a_new_group(
    before: list[int | None], hosts: list[int], number: int, islands: list[list[int]]
) -> None:
    assert dealt(before, hosts, number) == islands


def test_the_first_islands_are_of_consecutive_ranks_host_by_host() -> None:
    assert first_islands([0, 0, 0, 0, 0], 2) == [[0, 1, 2], [3, 4]]
    assert first_islands([0, 1, 2, 0, 1, 2], 3) == [[0, 3], [1, 4], [2, 5]]
    assert first_islands([0], 2) == [[0]]


@pytest.mark.parametrize("hosts", [[0, 1, 0, 0], [1, 0, 0, 0, 1], [2, 1, 0, 2, 1, 0]], ids=str)
def test_the_first_leaders_lead_in_later_groups(hosts: list[int]) -> None:
    """A leader has the residual between islands."""
    islands = first_islands(hosts, 2)
    before = [next(i for i, ranks in enumerate(islands) if rank in ranks) for rank in range(len(hosts))]
    assert dealt(before, hosts, 2) == islands


def spans(rank: int, steps: int) -> list[PlaceSpan]:
    """The places of a rank's steps."""
    return [PlaceSpan(0, 100 * rank + step, 100 * rank + step + 1) for step in range(steps)]


Story = dict[int, tuple[int, bool]]
"""Steps of each rank that is left of 0 1 2 | 3 4 5, and True if it holds the answer of the next one."""


@pytest.mark.parametrize(
    ("story", "steps"),
    [
        ({0: (4, False), 1: (3, True), 3: (3, True), 4: (3, True), 5: (3, True)}, [4, 4, 3, 3, 3]),
        ({1: (3, True), 2: (4, False), 5: (2, False)}, [4, 4, 2]),
        ({0: (4, True), 1: (4, True), 3: (5, False), 4: (4, True)}, [4, 4, 5, 5]),
    ],
    ids=["one has made it", "the first one has not", "each island alone"],
)
def test_a_step_is_finished_or_undone_by_each_island(story: Story, steps: list[int]) -> None:
    """All members of an island know all its places, and one of them counts them."""
    found: dict[int, LocalRound] = {}
    islands: list[list[int]] = [[]] * len(story)

    async def program(port: Port) -> None:
        everything = IslandMember(2)
        await everything.deal(port, 0, LocalRound())
        before, (made, holds) = list(story.items())[port.rank]
        member, own = IslandMember(2), LocalRound(made, spans(before // 3, made))
        member._island, member.holds = before // 3, holds
        found[port.rank] = await member.deal(port, port.size, own) or own
        islands[port.rank] = member.numbers(port.size)
        assert not member.holds

    VirtualWorld(HOST, len(story)).run(program)
    assert [found[rank].steps for rank in range(len(story))] == steps
    assert islands == [[before // 3 for before in story]] * len(story)
    for rank, before in enumerate(story):
        assert found[rank].spans == spans(before // 3, steps[rank])
    counting = [before // 3 for rank, before in enumerate(story) if found[rank].counts]
    assert counting == sorted({before // 3 for before in story})


def test_every_member_knows_the_places_of_its_island() -> None:
    known: dict[int, list[PlaceSpan]] = {}
    counts: dict[int, bool] = {}

    async def program(port: Port) -> None:
        member, own = IslandMember(2), LocalRound()
        await member.deal(port, 0, own)
        known[port.rank] = await member.step(port, own, spans(port.rank, 1))
        counts[port.rank] = own.counts
        assert member.holds

    VirtualWorld(HOST, 3).run(program)
    assert known[0] == known[1] == [*spans(0, 1), *spans(1, 1)]
    assert known[2] == spans(2, 1)
    assert counts == {0: True, 1: False, 2: True}


def test_newcomers_get_the_state_of_their_island() -> None:
    """Ranks 0 to 2 go on; 3 makes an island again, and 4 joins the island of rank 0."""
    newcomers: dict[int, frozenset[int]] = {}

    async def program(port: Port) -> None:
        member = IslandMember(3)
        member._island = (0, 1, 1, None, None)[port.rank]
        await member.deal(port, 3, LocalRound())
        newcomers[port.rank] = member.newcomers(3, port.rank)
        assert member.numbers(port.size) == [0, 1, 1, 2, 0]

    VirtualWorld(HOST, 5).run(program)
    assert [newcomers[rank] for rank in range(5)] == [{1}, set(), set(), set(), {1}]


def test_strategies_of_islands() -> None:
    assert island_member(pt.strategies.diloco()) is None
    islands = pt.strategies.islands(number=3)
    assert parts_of(islands) is not None
    assert island_member(islands) is not None
    check_elastic(islands)
    late = Strategy("late", parameters=after(4, every(3, aggregation.mean())), synchronized=False)
    with pytest.raises(ValueError, match="PT1208"):
        check_elastic(pt.strategies.islands(outer=late))


@pytest.mark.parametrize(
    ("leaving", "taken"),
    [
        ({1}, {0: 2.0}),
        ({2}, {3: 4.0}),
        ({0, 1}, {2: 3.0}),
        ({0, 1, 2}, {3: 7.0}),
        ({1, 2}, {0: 2.0, 3: 4.0}),
        (set(), {}),
        ({0, 1, 2, 3}, {}),
    ],
    ids=str,
)
def test_residuals_stay_in_the_island_or_in_the_run(leaving: set[int], taken: dict[int, float]) -> None:
    """Ranks 0 and 1, and 2 and 3, are islands; rank r holds back 2^r."""
    found: dict[int, float] = {}

    async def program(port: Port) -> None:
        mine: dict[str, torch.Tensor | None] = {"r/0": torch.tensor([2.0**port.rank]), "none/0": None}
        island = inside(port, ((0, 1), (2, 3)))
        given = await handed_over_by_islands(port, island, mine, leaves=port.rank in leaving)
        if given is not None:
            assert given.tensors.keys() == {"r/0"}
            found[port.rank] = float(given.tensors["r/0"])

    VirtualWorld(HOST, 4).run(program)
    assert found == taken
