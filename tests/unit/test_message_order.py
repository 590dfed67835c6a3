"""The order of messages in a replay: each machine follows its record, not the order of arrival."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from polytempo.cli.look.look_options import stop_of
from polytempo.cli.run.replay import counted
from polytempo.replay.entries import as_recorded, difference_of
from polytempo.replay.message_order import CUE, Life, MessageOrder, ReplayProgress, Stop
from polytempo.server.message import (
    COORDINATOR,
    Ask,
    Deal,
    Members,
    Message,
    Noted,
    Outbox,
    Pull,
    Pulled,
    Push,
    Pushed,
    Statistics,
    Ticket,
    View,
)
from polytempo.server.record import Asking, Entry, Lost, Noting, PushEntry, entry_of

LIVES: dict[Life, int] = {(0, 1): 0, (1, 1): 1, (1, 2): 2}
"""Worker 1 lived twice; the second life is played by rank 2."""


def push(worker: int, sequence: int, *, life: int = 1, basis: int = 0, tickets: tuple[int, ...] = (0,)) -> Push:
    return Push(worker, life, sequence, sequence, basis, 8, (0.1,), tickets, torch.ones(2))


def pull(worker: int, sequence: int) -> Pull:
    return Pull(worker, 1, sequence, sequence, -1)


class Noticing:
    """A machine that notes who came in, and answers nothing."""

    def __init__(self) -> None:
        self.entered: list[Message | Entry] = []
        self.passed_by: list[Message] = []
        self.missed: list[Entry] = []

    def enter(self, now_s: float, entry: Entry, message: Message | None) -> Outbox:
        self.entered.append(entry if message is None else message)
        return []

    def pass_by(self, now_s: float, source: int, message: Message) -> Outbox:
        self.passed_by.append(message)
        return []

    def missing(self, entry: Entry) -> Outbox:
        self.missed.append(entry)
        return []


def progress(stop: Stop | None = None, entries: Counter[Life] | None = None) -> ReplayProgress:
    return ReplayProgress(LIVES, entries or Counter(), workers=2, stop=stop)


def test_what_comes_early_is_held_until_its_turn() -> None:
    members = Members(COORDINATOR, 1, 1, ((0, 1), (1, 1)))
    first, second, third = pull(0, 1), push(1, 1), push(0, 2)
    machine = Noticing()
    order = MessageOrder("shard 0", [entry_of(m) for m in (members, first, second, third)], machine, progress())
    assert order.waits_for == "shard 0, entry 1 of 4: request 1 of the coordinator (members)"
    entered = []
    for message in (third, second, members, first):
        order.receive(0.0, 0, message)
        entered.append(len(machine.entered))
    assert entered == [0, 0, 1, 4]
    assert machine.entered == [members, first, *machine.entered[2:]]
    assert [(m.worker, m.sequence) for m in machine.entered[2:] if isinstance(m, Push)] == [(1, 1), (0, 2)]
    assert order.waits_for == ""


def test_what_is_in_no_record_passes_by_and_what_is_not_in_this_one_never_enters() -> None:
    machine = Noticing()
    order = MessageOrder("shard 0", [entry_of(pull(0, 1))], machine, progress())
    order.receive(0.0, 5, CUE)
    order.receive(0.0, 0, push(1, 1, life=2))
    assert (machine.passed_by, machine.entered) == ([CUE], [])


def test_the_coordinator_takes_in_losses_in_between() -> None:
    ask = Ask(1, 1, 1, ())
    machine = Noticing()
    order = MessageOrder("the coordinator", [Lost(0), entry_of(ask), Noting(0, 3), Lost(1)], machine, progress())
    order.tick(0.0)
    assert (machine.entered, machine.missed) == ([Lost(0)], [entry_of(ask)])
    order.receive(0.0, 9, Noted(0, COORDINATOR, 1, 3))
    order.receive(0.0, 9, Statistics(0, COORDINATOR, 1, 4, 0, 0, {}, 0, 0, 0, ()))
    order.receive(0.0, 1, ask)
    assert [type(m).__name__ for m in machine.entered] == ["Lost", "Ask", "Noted", "Lost"]
    assert len(machine.passed_by) == 1


def test_what_depends_on_the_arrival_of_answers_is_taken_from_the_record() -> None:
    taken = as_recorded(entry_of(push(0, 1, basis=7)), [push(0, 1, basis=5)])
    assert isinstance(taken, Push)
    assert taken.basis == 7
    asked = as_recorded(Asking(0, 1, 4, (1, 2)), [Ask(0, 1, 4, (1,), (b"{}",))])
    assert isinstance(asked, Ask)
    assert (asked.done, asked.rows) == ((1, 2), (b"{}",))


def test_answers_go_to_who_plays_that_life() -> None:
    deal = Deal(1, 2, 1, "train", (Ticket(4, 0, 4),))
    pushed = Pushed(0, 1, 2, 3, 9, 2, "dropped", "late")
    pulled, noted = Pulled(0, 0, 1, 1, 0, torch.ones(1)), Noted(0, COORDINATOR, 1, 1)
    stranger_to_us = Pulled(0, 1, 7, 1, 0, torch.ones(1))
    view = View(1, (), ())
    out = [(1, deal), (1, pushed), (0, pulled), (8, noted), (1, stranger_to_us), (0, view), (8, view)]
    shared = progress()
    sent = shared.addressed(out)
    assert sent == [(2, deal), (2, pushed), (0, pulled), (8, noted), (8, view)]
    assert shared.dealt[1, 2] == [4]
    assert shared.verdicts[0, (1, 2), 3] == (2, "dropped", "late")


def test_a_life_is_told_when_all_that_it_did_is_done() -> None:
    shared = progress(entries=Counter({(1, 1): 2}))
    order = MessageOrder("shard 0", [entry_of(push(1, 1)), entry_of(push(1, 2))], Noticing(), shared)
    assert order.receive(0.0, 1, push(1, 1)) == []
    assert order.receive(0.0, 1, push(1, 2)) == [(1, CUE)]


@pytest.mark.parametrize(
    ("stop", "taken"),
    [
        (Stop("step", 1), 3),  # tickets 0 and 1 have come
        (Stop("step", 2), 4),
        (Stop("ticket", 3), 2),
        (Stop("version", 3), 3),
        (Stop("step", 3), 4),  # the record ends before it
    ],
)
def test_where_a_replay_stops(stop: Stop, taken: int) -> None:
    shared = progress(stop)
    pushes = [push(0, 1, tickets=(0,)), push(0, 2, tickets=(3,)), push(0, 3, tickets=(1,)), push(0, 4, tickets=(2,))]

    class Pushed1(Noticing):
        def enter(self, now_s: float, entry: Entry, message: Message | None) -> Outbox:
            assert isinstance(entry, PushEntry)
            super().enter(now_s, entry, message)
            shared.note_push(entry, version=len(self.entered))
            return []

    order = MessageOrder("shard 0", [entry_of(p) for p in pushes], Pushed1(), shared)
    for each in pushes:
        order.receive(0.0, 0, each)
    assert order.passed == taken
    assert shared.stopped == (stop != Stop("step", 3))


def test_the_first_difference_is_named_and_ends_the_replay() -> None:
    recorded = entry_of(push(0, 1), version=3)
    shared = progress()
    shared.differs("shard 0, entry 1", difference_of(recorded, entry_of(push(0, 1), version=4)))
    shared.differs("shard 0, entry 2", "anything")
    assert shared.difference == (
        "shard 0, entry 1: push of worker 0 (life 1, tickets [0]): version recorded as 3, replayed as 4"
    )
    order = MessageOrder("shard 0", [recorded], Noticing(), shared)
    order.receive(0.0, 0, push(0, 1))
    assert order.passed == 0


@pytest.mark.parametrize(
    ("stop", "begins"),
    [
        (Stop("step", 33), "step 34"),
        (Stop("ticket", 5), "ticket 67"),
        (Stop("version", 66), "version 67"),
        (Stop("step", 34), None),
        (Stop("ticket", 67), None),
        (Stop("version", 67), None),
    ],
)
def test_a_resumed_record_has_no_place_to_stop_before_its_begin(stop: Stop, begins: str | None) -> None:
    """Two workers; the snapshot has the tickets 0 … 66, so 33 whole steps and a half."""
    resumed = progress(stop)
    resumed.pushed.add(0, 66)
    if begins is None:
        resumed.check_stop(66)
    else:
        with pytest.raises(ValueError, match=f"its record begins at {begins}: .* give {begins.replace(' ', '=')} or"):
            resumed.check_stop(66)


@pytest.mark.parametrize("stop", [Stop("step", 1), Stop("ticket", 0), Stop("version", 1), None])
def test_a_record_from_the_run_s_begin_has_every_stop(stop: Stop | None) -> None:
    progress(stop).check_stop(0)


@pytest.mark.parametrize(
    ("shown", "pushes", "words"),
    [(0, 0, "no pushes"), (1, 1, "the only push"), (7, 7, "all 7 pushes"), (20, 36, "the last 20 of 36 pushes")],
)
def test_how_pushes_are_counted(shown: int, pushes: int, words: str) -> None:
    assert counted(shown, pushes) == words


def test_how_a_stop_is_written() -> None:
    assert Stop(*stop_of("step=12")) == Stop("step", 12)
    assert Stop(*stop_of(" version = 3")) == Stop("version", 3)
    for text in ("step", "step=", "step=-1", "step=-4", "step=0", "version=0", "step=1.5", "epoch=3", "=3", "step=³"):
        with pytest.raises(ValueError, match="must be written step=K or version=K with K >= 1"):
            stop_of(text)
