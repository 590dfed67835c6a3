"""`ElasticMember`: what a process of an elastic run remembers of the step in hand, so that none is applied by halves.

    exchange ──▶ holds ──▶ commit point ──▶ committed ──▶ applied
       │           │            │               │
     undone      undone      undone unless    applied, whatever happens to the others
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
"""What a member does before it goes on with a view: apply the answer that it holds, drop what it has of the step in
hand, take the training's state from the view's first member, or nothing, for it takes no part."""


class ElasticMember:
    """One process. `applied` counts the steps of the whole run that its state has."""

    def __init__(self, life: int) -> None:
        self.life = life
        self.generation = 0
        self.applied = 0
        self.holds = 0
        self.stateful = False

    def exchanged(self, steps: int = 1) -> None:
        """The whole answer of the next step is here, or of a round of so many steps."""
        self.holds = steps

    def dropped(self) -> None:
        """What was said to be here is not the whole answer."""
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
        """What `RunMembership` has to know when the group of this generation has been left."""
        return Report(self.life, self.generation, self.applied, self.holds, self.stateful, leaving, finished)

    def enter(self, view: GroupView) -> Verdict:
        """What to do before the first step of `view`. `stepped` or `taken_over` say when it is done."""
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
