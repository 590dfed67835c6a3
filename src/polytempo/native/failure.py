"""Errors for the statuses of the native core: they name the ranks and their calls."""

from __future__ import annotations

import ctypes
from typing import Protocol

from polytempo.core.errors import Mismatch, PeerLost, PolytempoError, TimedOut
from polytempo.native.call import NativeCall

FINE, LOST, LATE, MISMATCH, BROKEN = range(5)
"""The statuses."""

LOST_WHY = "Connection closed by peer: its process has ended, or it has left the group"
"""The reason of a lost peer, in the words of torch's own backends, for which scripts search."""


class GroupFacts(Protocol):
    """A group (`native.group.Group`), as errors describe it."""

    rank: int
    names: list[int]

    @property
    def culprit(self) -> int:
        """The rank that broke the group."""

    def missing(self) -> list[int]:
        """The ranks that have not come."""

    def expecting(self, sent: ctypes.c_int64, expected: ctypes.c_int64) -> int:
        """The rank that expects other bytes than the culprit sends, and how many; -1: none does."""

    def call_of(self, rank: int) -> NativeCall:
        """The call that a rank has announced."""


def failure(group: GroupFacts, status: int, what: str, timeout_s: float) -> PolytempoError:
    """The error for the call `what`, which ended with LOST, LATE or MISMATCH."""
    me, culprit = group.names[group.rank], group.culprit
    if status == LATE:
        missing = ", ".join(str(group.names[rank]) for rank in group.missing())
        return TimedOut(me, None, what, timeout_s, f"rank {missing} did not come")
    if status == MISMATCH:
        return Mismatch(
            f"ranks do different things at once: {_disagreement(group, culprit)}; all ranks of a group "
            "must make the same calls in the same order, with equal shapes and dtypes"
        )
    return PeerLost(me, None, what, group.names[culprit], LOST_WHY)


def repeated(group: GroupFacts, first: PolytempoError, what: str) -> PolytempoError:
    """The error for the call `what` in a group that broke before, with the error `first`: one of the same kind."""
    me, reason = group.names[group.rank], f"the group broke in an earlier call: {first}"
    match first:
        case Mismatch():
            return Mismatch(f"rank {me}: {what} cannot begin; {reason}")
        case TimedOut(timeout_s=timeout_s):
            return TimedOut(me, None, what, timeout_s, reason)
        case _:
            return PeerLost(me, None, what, group.names[group.culprit], reason)


def _disagreement(group: GroupFacts, culprit: int) -> str:
    """The ranks that disagree, and their calls."""
    sent, expected = ctypes.c_int64(), ctypes.c_int64()
    expecting = group.expecting(sent, expected)
    mine, me = group.call_of(group.rank), group.names[group.rank]
    if expecting < 0:
        return f"rank {me} is in {mine}, rank {group.names[culprit]} in {group.call_of(culprit)}"
    to = "itself and" if expecting == culprit else f"rank {group.names[expecting]}, which"
    return f"in {mine}, rank {group.names[culprit]} sends {sent.value} bytes to {to} expects {expected.value}"
