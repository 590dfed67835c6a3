"""The collectives of a virtual world that some of their members have reached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from polytempo.core import Mismatch
from polytempo.core.op import Collective
from polytempo.worlds.operations import Flight, Meeting, facts, signature

_MOST_TUPLES = 4096
_Key = tuple[int, int, int]
"""A group's number, a channel, and how many collectives there were before."""


class Meetings:
    """Brings the members' calls together: the n-th of each member of a group on a channel are one collective.

    Cost: constant for a call, however many members there are, where they name their group by one and the same tuple.
    """

    def __init__(self) -> None:
        self._open: dict[_Key, Meeting] = {}
        self._calls: dict[_Key, int] = defaultdict(int)
        self._groups: dict[tuple[int, ...], int] = {}
        self._tuples: dict[int, tuple[tuple[int, ...], int]] = {}
        """By identity: a tuple, which stays as long as its entry, and its group's number."""

    def join(self, flight: Flight, op: Collective[Any]) -> tuple[Meeting, bool]:
        """One more member is there. Also says whether all are now."""
        group = self._group(op.members)
        mine = (group, op.channel, flight.rank)
        call = self._calls[mine]
        self._calls[mine] = call + 1
        key = (group, op.channel, call)
        meeting = self._open.get(key)
        if meeting is None:
            meeting = self._open[key] = Meeting(flight.rank, op, facts(op))
        meeting.arrived[flight.rank] = (flight, op)
        if meeting.clash is None and facts(op) != meeting.facts:
            meeting.clash = Mismatch(
                f"step {flight.step}: rank {flight.rank} calls {signature(op)}, but rank {meeting.first_rank} calls "
                f"{signature(meeting.first)} at the same place"
            )
        complete = len(meeting.arrived) == len(op.members)
        if complete:
            del self._open[key]
        return meeting, complete

    def without(self, rank: int) -> list[Flight]:
        """`rank` is gone: what it will never come to is over. The flights of those who wait there."""
        gone = [key for key, meeting in self._open.items() if rank in meeting.first.members]
        return [flight for key in gone for flight, _ in self._open.pop(key).arrived.values()]

    def open(self) -> Iterable[Meeting]:
        """Those that some members have not reached."""
        return self._open.values()

    def _group(self, members: tuple[int, ...]) -> int:
        """Equal groups have one number. A long tuple's hash takes long, and Python forgets it."""
        known = self._tuples.get(id(members))
        if known is None:
            if len(self._tuples) >= _MOST_TUPLES:
                self._tuples.clear()
            known = self._tuples[id(members)] = members, self._groups.setdefault(members, len(self._groups))
        return known[1]
