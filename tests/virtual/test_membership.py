"""The members of an elastic run: stories of the machine, and a storm over it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from polytempo.membership.member import ElasticMember
from polytempo.membership.message import (
    Begin,
    Dismiss,
    End,
    Fail,
    GroupView,
    Interrupt,
    Kill,
    Leave,
    Order,
    Ready,
    Report,
)
from polytempo.membership.run_membership import RunMembership
from virtual.membership_storm import Broken, Storm

SEEDS = 200


def begun(minimum: int = 1, maximum: int = 4, wanted: int = 3, restarts: int = 0) -> RunMembership:
    """A run with the lives 0, 1 and 2 in its first view."""
    machine = RunMembership(minimum, maximum, wanted, restarts=restarts, answer_s=10.0)
    assert machine.tick(0.0) == [Begin(life) for life in range(wanted)]
    orders: list[Order] = []
    for life in range(wanted):
        orders = machine.receive(0.0, Ready(life))
    assert orders == [GroupView(1, tuple(range(wanted)), 0, 0)]
    return machine


def report(life: int, applied: int, *, holds: bool = False, **more: bool) -> Report:
    """The report on generation 1 of a member with the state."""
    return Report(life, 1, applied, holds, stateful=True, **more)


def test_a_step_that_one_survivor_has_applied_is_finished_by_all() -> None:
    machine = begun()
    machine.ended(1.0, 2)
    machine.receive(1.0, report(0, 7, holds=True))
    assert machine.receive(1.0, report(1, 8)) == [
        GroupView(2, (1, 0), 2, 8)
    ]  # 1 knows all of step 8, so it comes first


def test_a_round_of_steps_is_finished_as_one() -> None:
    machine = begun()
    machine.ended(1.0, 2)
    machine.receive(1.0, replace(report(0, 8), holds=4))
    assert machine.receive(1.0, report(1, 12)) == [GroupView(2, (1, 0), 2, 12)]
    member = ElasticMember(0)
    member.taken_over(8)
    member.exchanged(4)
    assert member.enter(GroupView(2, (1, 0), 2, 12)) == "finish"
    member.stepped()
    assert (member.applied, member.holds) == (12, 0)
    machine = begun()
    machine.ended(1.0, 2)
    machine.receive(1.0, replace(report(0, 8), holds=3))  # of another round: this cannot be
    assert isinstance(machine.receive(1.0, report(1, 12))[-1], Fail)


def test_a_step_that_no_survivor_has_applied_is_undone() -> None:
    machine = begun()
    machine.ended(1.0, 2)
    machine.receive(1.0, report(0, 7, holds=True))
    assert machine.receive(1.0, report(1, 7)) == [GroupView(2, (0, 1), 2, 7)]
    member = ElasticMember(0)
    member.taken_over(7)
    member.exchanged()
    assert member.enter(GroupView(2, (0, 1), 2, 7)) == "undo"
    assert not member.holds


def test_no_view_comes_before_the_end_of_a_lost_member_is_known() -> None:
    """A member that is only slow must not train on beside the others."""
    machine = begun()
    assert machine.receive(1.0, report(0, 7)) == [Interrupt(1, broken=True)]
    assert machine.receive(1.0, report(1, 7)) == []
    assert machine.tick(12.0) == [Kill(2)]
    assert machine.ended(12.1, 2) == [GroupView(2, (0, 1), 2, 7)]


def test_newcomers_come_in_at_a_border_of_steps_behind_those_that_have_the_state() -> None:
    machine = begun()
    assert machine.want(1.0, 4) == [Begin(3)]
    assert machine.receive(2.0, Ready(3)) == [Interrupt(1)]
    for life in (2, 1):
        machine.receive(2.0, report(life, 9))
    assert machine.receive(2.0, report(0, 9)) == [GroupView(2, (0, 1, 2, 3), 3, 9)]


def test_a_group_is_called_broken_only_when_a_member_is_gone() -> None:
    """Newcomers do not end the forming of a group; a loss does, also after them."""
    machine = begun(restarts=5)
    machine.want(1.0, 4)
    assert machine.receive(2.0, Ready(3)) == [Interrupt(1)]
    assert machine.ended(3.0, 2) == [Begin(4), Interrupt(1, broken=True)]
    assert machine.tick(3.1) == []


def test_a_run_that_is_to_end_keeps_those_that_want_to_leave_and_begins_none() -> None:
    machine = begun(minimum=3, restarts=5)
    machine.save_and_end()
    machine.ended(1.0, 2)
    machine.receive(1.0, report(0, 5, leaving=True))
    assert machine.receive(1.0, report(1, 5, leaving=True)) == [GroupView(2, (0, 1), 2, 5)]


def test_a_lost_process_is_replaced_as_often_as_was_said() -> None:
    machine = begun(restarts=1)
    assert machine.ended(1.0, 2)[0] == Begin(3)
    machine.receive(1.0, report(0, 5))
    assert machine.receive(1.0, report(1, 5)) == [GroupView(2, (0, 1), 2, 5)]  # the run does not wait for it
    assert Begin(4) not in machine.ended(2.0, 3)


def test_members_that_are_too_many_are_asked_to_leave_and_dismissed() -> None:
    machine = begun()
    assert machine.want(1.0, 2) == [Leave(2)]
    machine.receive(1.0, report(0, 5))
    machine.receive(1.0, report(1, 5))
    assert machine.receive(1.0, report(2, 5, leaving=True)) == [GroupView(2, (0, 1), 2, 5), Dismiss(2)]


def test_the_last_member_with_the_state_stays_until_another_one_has_it() -> None:
    machine = begun(wanted=1, restarts=1)
    machine.want(1.0, 2)
    machine.receive(1.0, report(0, 5, leaving=True))
    assert machine.receive(1.0, Ready(1)) == [GroupView(2, (0, 1), 1, 5)]


def test_below_the_minimum_survivors_wait_and_then_the_run_fails() -> None:
    machine = begun(minimum=2, wanted=2, restarts=1)
    assert machine.ended(1.0, 1)[0] == Begin(2)
    assert machine.receive(1.0, report(0, 5)) == []
    assert machine.receive(2.0, Ready(2)) == [GroupView(2, (0, 2), 1, 5)]
    machine.ended(3.0, 2)
    assert isinstance(machine.receive(3.0, Report(0, 2, 5, False, stateful=True))[-1], Fail)


def test_without_a_member_that_has_the_state_the_run_fails() -> None:
    machine = begun(restarts=5)
    for life in (0, 1):
        machine.ended(1.0, life)
    machine.receive(1.0, report(2, 4))
    assert machine.view is not None
    machine.receive(1.0, Ready(3))
    machine.receive(1.0, Report(2, 2, 4, False, stateful=True))  # stopped for life 3
    assert machine.view == GroupView(3, (2, 3), 1, 4)
    machine.ended(2.0, 2)
    orders = machine.receive(2.0, Report(3, 3, 0, False, stateful=False))
    assert [order for order in orders if isinstance(order, Fail)], orders


def test_the_run_is_over_when_its_first_member_has_finished() -> None:
    machine = begun()
    machine.receive(1.0, report(1, 9, finished=True))
    machine.ended(1.0, 2)
    assert machine.receive(1.0, report(0, 9, finished=True)) == [End()]


def test_a_run_whose_first_member_is_lost_at_its_end_finishes_again() -> None:
    """The first member's result was lost with it."""
    machine = begun()
    machine.receive(1.0, report(1, 9, finished=True))
    machine.ended(1.0, 0)
    assert machine.receive(1.0, report(2, 9)) == [GroupView(2, (1, 2), 2, 9)]


def test_bounds_that_no_run_can_keep_are_refused() -> None:
    with pytest.raises(ValueError, match="got 3, 2 and 4"):
        RunMembership(3, 4, 2)


def test_a_storm_loses_no_step_and_applies_none_by_halves() -> None:
    kinds = {"regrouped": 0, "finished": 0}
    for seed in range(SEEDS):
        storm = Storm(seed, steps=1 + seed % 3)
        try:
            storm.run()
        except (Broken, AssertionError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        kinds["regrouped"] += len(storm.views) > 1
        kinds["finished"] += storm.ended_well
    assert min(kinds.values()) > SEEDS * 0.8, kinds  # else the storm tests little


class Forgetful(RunMembership):
    """Takes the least step of any survivor for the step of all."""

    def _next(self, view: GroupView, reports: list[Report], late: bool) -> list[Order]:
        least = min((r.applied for r in reports), default=0)
        return super()._next(view, [replace(r, applied=least) if r.stateful else r for r in reports], late)


class Hasty(RunMembership):
    """Does not wait for all members' reports."""

    def _regroup(self, now_s: float, view: GroupView, since_s: float) -> list[Order]:
        reports = [self._reports[life] for life in self._members() if life in self._reports]
        return self._next(view, reports, late=False) if reports else []


def finds(storm: Storm) -> bool:
    """True if the storm notices."""
    try:
        storm.run()
    except AssertionError:
        return True
    return False


def test_the_storm_notices_planted_bugs() -> None:
    assert any(finds(Storm(seed, commit=False)) for seed in range(SEEDS)), "no commit point"
    assert any(finds(Storm(seed, Forgetful)) for seed in range(SEEDS)), "a step undone that one has applied"
    assert any(finds(Storm(seed, Hasty)) for seed in range(SEEDS)), "a view without all reports"
