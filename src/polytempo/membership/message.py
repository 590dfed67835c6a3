"""Messages between the processes of an elastic run and `RunMembership`, as plain data.

process ── Ready, Report ──▶ RunMembership ── GroupView, Interrupt, Leave, Dismiss, End ──▶ processes
                                           ── Begin, Kill, Fail ──▶ the launcher

A *life* is the number of a process among all processes of the run. A life is never used again.
"""

from __future__ import annotations

from msgspec import Struct


class MembershipMessage(Struct, frozen=True, tag=True, array_like=True):
    """A message; its JSON begins with the name of its kind."""


class Ready(MembershipMessage, frozen=True):
    """A process has made its model and waits for a view."""

    life: int


class Report(MembershipMessage, frozen=True):
    """A member has left the group of its generation: the group broke, was interrupted, or the training is over."""

    life: int
    generation: int
    applied: int
    """Steps that this member has applied, over the whole run."""
    holds: int
    """The number of steps in the whole answer that it has and has not applied yet: 1, the steps of a round, or 0."""
    stateful: bool
    """True if it has the training's state, from before this view or taken over since."""
    leaving: bool = False
    """True if it wants to leave."""
    finished: bool = False
    """True if it has come to the end of the training."""


class GroupView(MembershipMessage, frozen=True):
    """The members from now on. The position of a life in `members` is its rank."""

    generation: int
    members: tuple[int, ...]
    """The first `stateful` of them have the training's state; the others get it from the first one."""
    stateful: int
    step: int
    """Steps that all members have applied when they begin. A member with fewer applies the answer that it holds; a
    member that holds an answer to a later step drops it."""


class Interrupt(MembershipMessage, frozen=True):
    """The members of this generation stop at their next common border of steps, because others want to join."""

    generation: int
    broken: bool = False
    """True if a member is lost, or has left: the group cannot go on, nor can it still be formed."""


class Leave(MembershipMessage, frozen=True):
    """This member has to leave at the next border of steps."""

    life: int


class Dismiss(MembershipMessage, frozen=True):
    """This process is no longer needed, and may end."""

    life: int


class End(MembershipMessage, frozen=True):
    """The training is over."""


class Begin(MembershipMessage, frozen=True):
    """The launcher starts the process of this life."""

    life: int


class Kill(MembershipMessage, frozen=True):
    """The launcher ends this process: it has been silent for too long."""

    life: int


class Fail(MembershipMessage, frozen=True):
    """The run cannot go on."""

    reason: str


Order = GroupView | Interrupt | Leave | Dismiss | End | Begin | Kill | Fail
