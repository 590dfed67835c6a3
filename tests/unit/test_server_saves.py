"""A snapshot of evenly dealt work is of one step on all shards, however late a shard hears of it; so is its resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from polytempo.core.rule import Service, UpdateRule
from polytempo.runs.served.run_snapshot import RunSnapshot, resumed, write_run_snapshot
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.coordinator import Coordinator, Nodes
from polytempo.server.layout import Parameter, Span
from polytempo.server.message import Ask, Deal, Members, Message, Noted, Request, Save
from polytempo.server.rules.synchronous_step import hardsync
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.snapshot import newest_whole, write

SHARDS = (10, 11)


class Team:
    """Two workers, each with one ticket at a time, and two shards that answer when the test lets them."""

    def __init__(self) -> None:
        chains = [(node,) for node in SHARDS]
        self.coordinator = Coordinator(Nodes(9, [0, 1], chains), BatchScheduler(2, 20, "evenly", 2))
        self.asked = [0, 0]
        self.unanswered: list[tuple[int, Request]] = []
        self.dealt: list[tuple[int, int]] = []
        """Worker and ticket."""
        for worker in (0, 1):
            self.call(worker)
        self.answer(2)

    def call(self, worker: int, *done: int) -> None:
        self.asked[worker] += 1
        self.take(self.coordinator.receive(0.0, worker, Ask(worker, 1, self.asked[worker], done)))

    def take(self, out: Sequence[tuple[int, Message]]) -> None:
        for to, message in out:
            if isinstance(message, Deal):
                self.dealt += [(to, ticket.number) for ticket in message.tickets]
            elif isinstance(message, Request):
                self.unanswered.append((to, message))

    def work(self) -> list[int]:
        """Each worker does its tickets and calls for more; returns these tickets."""
        done, self.dealt = self.dealt, []
        for worker, ticket in done:
            self.call(worker, ticket)
        return [ticket for _, ticket in done]

    def answer(self, count: int) -> None:
        """The shards answer the oldest `count` requests."""
        for _ in range(count):
            node, request = self.unanswered.pop(0)
            noted = Noted(SHARDS.index(node), request.worker, request.incarnation, request.sequence, "")
            self.take(self.coordinator.receive(0.0, node, noted))


def test_no_ticket_behind_a_snapshot_is_dealt_before_all_shards_know_of_it() -> None:
    team = Team()
    assert [team.work(), team.work()] == [[0, 1], [2, 3]]
    team.take(team.coordinator.save(0.0, 1))
    orders = [request for _, request in team.unanswered]
    assert [(type(order), order.at) for order in orders if isinstance(order, Save)] == [(Save, 8)] * 2
    assert [team.work(), team.work(), team.work()] == [[4, 5], [6, 7], []], "there is a step to do meanwhile"
    team.answer(1)
    assert team.work() == [], "one shard does not know yet"
    team.answer(1)
    assert [team.work(), team.work()] == [[8, 9], [10, 11]]


def test_no_step_begins_before_every_shard_knows_who_makes_it() -> None:
    """Else a worker's gradient is in the step of one shard, and a step of its own on another."""
    team = Team()
    assert [team.work(), team.work()] == [[0, 1], [2, 3]]
    ours = [ticket for ticket in team.dealt if ticket[0] == 0]
    team.take(team.coordinator.lose(0.0, 1))
    assert [type(request) for _, request in team.unanswered] == [Members] * 2
    team.dealt = ours
    assert [team.work(), team.work()] == [[4], []], "worker 0 makes the begun step alone"
    team.answer(1)
    assert team.work() == [], "one shard still counts worker 1"
    team.answer(1)
    assert [team.work(), team.work(), team.work()] == [[6], [5], [7]]


def part(folder: Path, number: int, shard: int, batches: int) -> None:
    """The part of a shard that has so many batches."""
    service = Service(hardsync(), optimizer=UpdateRule("sgd"), shards=2)
    one = Shard(shard, (Parameter("w", 2),), (Span(shard, shard + 1),), torch.zeros(1), service, native=False)
    one.decisions.applied.add(0, batches - 1)
    write(folder, number, shard, *one.dump())


@pytest.mark.parametrize(
    ("newest", "even", "chosen"),
    [
        ((6, 6), True, (2, [6, 6])),
        ((8, 6), True, (1, [4, 4])),
        ((8, 6), False, (2, [8, 6])),
    ],
)
def test_a_resume_takes_the_snapshot_that_is_of_one_step(
    tmp_path: Path, newest: tuple[int, int], even: bool, chosen: tuple[int, list[int]]
) -> None:
    """Killed between the two orders of one snapshot, shards leave parts of two steps."""
    for number, batches in enumerate(((4, 4), newest), start=1):
        write_run_snapshot(tmp_path, RunSnapshot(number, 0, 0, {}, ""))
        for shard in (0, 1):
            part(tmp_path, number, shard, batches[shard])
    found = resumed(tmp_path, 2, {}, even=even)
    assert (found.run_snapshot.number, found.batches) == chosen
    assert newest_whole(tmp_path, 2) == chosen[0], "newer entries are gone"


def test_where_no_snapshot_is_of_one_step_the_newest_is_taken(tmp_path: Path) -> None:
    write_run_snapshot(tmp_path, RunSnapshot(1, 0, 0, {}, ""))
    part(tmp_path, 1, 0, 8)
    part(tmp_path, 1, 1, 6)
    assert resumed(tmp_path, 2, {}, even=True).batches == [8, 6]
