"""`ElasticMember`: a process of an elastic run remembers its present step, so that no step is applied by halves.

    exchange ──▶ holds ──▶ commit point ──▶ committed ──▶ applied
       │           │            │               │
     undone      undone      undone unless    applied, also if other members are lost
                             another member
                             has committed

The commit point is a collective after the exchange: a member that comes back from it knows that every member holds the
whole answer. So if one member has applied a step, all others can; if none has, all drop it. Where members exchange
parameters once in several steps, "step" is that round.
"""

from __future__ import annotations

from typing import Literal

from polytempo.membership.message import GroupView, Report

Verdict = Literal["finish", "undo", "take over", "wait"]
"""A member's action before a view: apply the answer that it holds, drop its part of the present step, take the state of
training from the view's first member, or nothing, because it takes no part."""


class ElasticMember:
    """One process. `applied` counts the steps of the whole run that its state has."""

    def __init__(self, life: int) -> None:
        self.life = life
        self.generation = 0
        self.applied = 0
        self.holds = 0
        self.stateful = False

    def exchanged(self, steps: int = 1) -> None:
        """The whole answer of the next step, or of a round of `steps`, is here."""
        self.holds = steps

    def dropped(self) -> None:
        """The answer is not here, or not whole."""
        self.holds = 0

    def stepped(self) -> None:
        """The step has been applied: after the commit point, or because a view says so."""
        assert self.holds, self.applied
        self.applied += self.holds
        self.holds = 0

    def taken_over(self, step: int) -> None:
        """The training's state after `step` is here."""
        self.stateful, self.applied, self.holds = True, step, 0

    def report(self, *, leaving: bool = False, finished: bool = False) -> Report:
        """The report to `RunMembership` after this process has left the group of this generation."""
        return Report(self.life, self.generation, self.applied, self.holds, self.stateful, leaving, finished)

    def enter(self, view: GroupView) -> Verdict:
        """The verdict for the first step of `view`. Call `stepped` or `taken_over` when it is done."""
        self.generation = view.generation
        if self.life not in view.members:
            return "wait"
        if view.members.index(self.life) >= view.stateful:
            return "take over"
        if view.step == self.applied:
            self.holds = 0
            return "undo"
        assert self.holds, (self.applied, view)
        assert view.step == self.applied + self.holds, (self.applied, view)
        return "finish"
