"""The conductor of an elastic run's members: it performs orders, and ends processes that are late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from polytempo.engines.engine import EngineProcess, Role
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.membership.message import Dismiss, GroupView, Interrupt, Order, Ready
from polytempo.membership.run_membership import RunMembership
from polytempo.runs.elastic.conductor import MembershipConductor
from polytempo.runs.elastic.member_board import LauncherBoard, MemberBoard

Ended = list[int]


class Launcher:
    """A conductor with processes that are only numbers, and a clock that the test sets."""

    def __init__(self, held: Rendezvous, joined: Rendezvous) -> None:
        self.now_s, self.ended, self.orders = 0.0, Ended(), list[Order]()
        self._joined = joined
        self.conductor = MembershipConductor(
            RunMembership(1, 3, 2),
            LauncherBoard(held),
            lambda process: self.ended.append(process.role.life),
            self.orders.append,
            lambda: self.now_s,
        )

    def begun(self) -> list[MemberBoard]:
        """Processes for all lives that wait for one; they say that they are ready."""
        boards = []
        while self.conductor.to_begin:
            life = self.conductor.to_begin.pop(0)
            self.conductor.processes[life] = EngineProcess(Role("member", life, life), Path("log"))
            boards.append(MemberBoard(self._joined, life))
            boards[-1].say(Ready(life))
        return boards


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with closing(Rendezvous.held("127.0.0.1")) as held, closing(Rendezvous.joined(held.url)) as joined:
        yield Launcher(held, joined)


def test_all_that_are_ready_get_the_first_view_and_a_lost_one_breaks_it(launcher: Launcher) -> None:
    conductor = launcher.conductor
    conductor.tick()
    boards = launcher.begun()
    assert list(conductor.hear()) == [Ready(0), Ready(1)]
    assert [board.next() for board in boards] == [GroupView(1, (0, 1), 0, 0)] * 2
    conductor.processes[1].exit_code = -9
    conductor.lose(1)
    assert boards[0].sees_break()
    assert (conductor.members, conductor.running, conductor.to_begin) == ((0, 1), [0], [2])
    assert Interrupt(1, broken=True) in launcher.orders


def test_a_stopped_process_is_ended_and_one_that_wakes_up_in_time_is_not(launcher: Launcher) -> None:
    conductor = launcher.conductor
    conductor.tick()
    launcher.begun()
    for process in conductor.processes.values():
        process.stopped = True
    conductor.stop_late()
    conductor.processes[0].stopped = False
    launcher.now_s = 1.0
    conductor.stop_late()
    assert launcher.ended == [1]


def test_a_dismissed_process_ends_in_time_or_is_ended(launcher: Launcher) -> None:
    conductor = launcher.conductor
    conductor.tick()
    conductor.perform([Dismiss(1)])  # it has no process yet
    [board] = launcher.begun()
    assert (conductor.running, conductor.dismissed) == ([0], {})
    conductor.perform([Dismiss(0)])
    assert board.next() == Dismiss(0)
    for launcher.now_s in (29.0, 31.0):
        conductor.stop_late()
    assert launcher.ended == [0]
