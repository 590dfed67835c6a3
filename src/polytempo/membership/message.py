"""What the processes of an elastic run and `RunMembership` say to each other, as plain data.

process ── Ready, Report ──▶ RunMembership ── GroupView, Interrupt, Leave, Dismiss, End ──▶ processes
                                           ── Begin, Kill, Fail ──▶ the launcher

A *life* is the number of a process among all processes of the run. A life is never used again.
"""

from __future__ import annotations

from typing import NamedTuple


class Ready(NamedTuple):
    """A process has made its model and waits for a view."""

    life: int


class Report(NamedTuple):
    """A member has left the group of its generation: the group broke, was interrupted, or the training is over."""

    life: int
    generation: int
    applied: int
    """Steps that this member has applied, over the whole run."""
    holds: int
    """How many steps after these are in the whole answer that it has and has not applied yet: 1, those of a round, or 0
    where it has none."""
    stateful: bool
    """Whether it has the training's state: it had it before this view, or has taken it over since."""
    leaving: bool = False
    """Whether it wants to leave."""
    finished: bool = False
    """Whether it has come to the end of the training."""


class GroupView(NamedTuple):
    """Who takes part from now on. The place of a life in `members` is its rank."""

    generation: int
    members: tuple[int, ...]
    """The first `stateful` of them have the training's state; the others get it from the first one."""
    stateful: int
    step: int
    """Steps that all members have applied when they begin: a member with one less applies the answer that it holds, and
    one that holds an answer beyond them drops it."""


class Interrupt(NamedTuple):
    """The members of this generation stop at their next common border of steps, because others want to join."""

    generation: int
    broken: bool = False
    """Whether a member is lost, or has left: the group cannot go on, nor can it still be formed."""


class Leave(NamedTuple):
    """This member is to leave at the next border of steps."""

    life: int


class Dismiss(NamedTuple):
    """This process is no longer needed, and may end."""

    life: int


class End(NamedTuple):
    """The training is over."""


class Begin(NamedTuple):
    """The launcher starts the process of this life."""

    life: int


class Kill(NamedTuple):
    """The launcher ends this process for certain: it has been silent for too long."""

    life: int


class Fail(NamedTuple):
    """The run cannot go on."""

    reason: str


Order = GroupView | Interrupt | Leave | Dismiss | End | Begin | Kill | Fail
