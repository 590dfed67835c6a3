"""The collectives of a virtual world: its members' calls are brought together, and end together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from polytempo.cluster import Cluster
from polytempo.cluster.computing_time import COLLECTIVE
from polytempo.core import Mismatch
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.core.op import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Collective, ReduceScatter
from polytempo.worlds.collective import (
    empty_answers,
    member_bytes,
    members_answers,
    members_bytes,
    members_seconds,
    message_bytes,
    num_rounds,
)
from polytempo.worlds.object_store.round_cost import collective_cost, sent_bytes
from polytempo.worlds.virtual.clockwork import Asymmetric, Clockwork, Flight, VirtualStrand
from polytempo.worlds.virtual.network import Network
from polytempo.worlds.virtual.processors import Processors

_MOST_TUPLES = 4096
_Key = tuple[int, int, int]
"""A group's number, a channel, and how many collectives there were before."""


@dataclass(slots=True, eq=False)
class Meeting:
    """A collective that some members have reached. `clash`: why it can never take place."""

    first_rank: int
    first: Collective[Any]
    facts: tuple[object, ...]
    arrived: dict[int, tuple[Flight, Collective[Any]]] = field(default_factory=dict)
    clash: Exception | None = None


def facts(op: Collective[Any]) -> tuple[object, ...]:
    """The facts that all members of a collective must agree on, to compare."""
    match op:
        case AllReduce(buffer) | AllGather(buffer) | ReduceScatter(buffer):
            return type(op), buffer.shape, buffer.dtype
        case Broadcast(buffer, source):
            return Broadcast, buffer.shape, buffer.dtype, source
        case AllToAll(pieces, _):
            return AllToAll, pieces[0].dtype
    return (type(op),)


def signature(op: Collective[Any]) -> str:
    """The same facts, to read."""
    match op:
        case AllReduce(buffer) | AllGather(buffer) | ReduceScatter(buffer):
            return f"{op.kind}({tuple(buffer.shape)} {buffer.dtype})"
        case Broadcast(buffer, source):
            return f"broadcast({tuple(buffer.shape)} {buffer.dtype} from rank {source})"
        case AllToAll(pieces, _):
            return f"all_to_all({pieces[0].dtype})"
        case Barrier():
            return "barrier()"
    raise TypeError(f"{op!r} is not a collective of a world")


def who_waits_for_what(now_s: float, strands: Sequence[Sequence[VirtualStrand]], meetings: Iterable[Meeting]) -> str:
    """The text of a deadlock: a line for each of the ranks' unfinished strands."""
    absent = {
        id(flight): sorted(set(meeting.first.members) - set(meeting.arrived))
        for meeting in meetings
        for flight, _ in meeting.arrived.values()
    }
    lines = [f"deadlock at {now_s:.6f} s: no rank can go on."]
    for rank, of_rank in enumerate(strands):
        for flight in (strand.waits_for for strand in of_rank):
            if flight is not None:
                without = f", without ranks {absent[id(flight)]}" if id(flight) in absent else ""
                lines.append(
                    f"  rank {rank} waits for {flight}{without} (step {flight.step}, since {flight.started_s:.6f} s)"
                )
    return "\n".join(lines)


class Meetings:
    """Brings the members' calls together: the n-th of each member of a group on a channel are one collective.

    Cost: constant for a call, however many members there are, where they name their group by one and the same tuple.
    """

    def __init__(self, acting: Sequence[int] | None = None) -> None:
        self._acting = acting
        self._open: dict[_Key, Meeting] = {}
        self._calls: dict[_Key, int] = defaultdict(int)
        self._groups: dict[tuple[int, ...], int] = {}
        self._tuples: dict[int, tuple[tuple[int, ...], int]] = {}
        """(id of a tuple) -> the tuple, which stays as long as its entry, and its group's number."""

    def join(self, flight: Flight, op: Collective[Any]) -> tuple[Meeting, bool]:
        """Add a member to its collective. The second value is True when all are there."""
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
        complete = len(meeting.arrived) == len(op.members if self._acting is None else self._acting)
        if complete:
            del self._open[key]
        return meeting, complete

    def without(self, rank: int) -> list[Flight]:
        """Drop the collectives that `rank` can no longer come to, and return the operations that wait there."""
        gone = [key for key, meeting in self._open.items() if rank in meeting.first.members]
        return [flight for key in gone for flight, _ in self._open.pop(key).arrived.values()]

    def open(self) -> Iterable[Meeting]:
        """Collectives that some members have not reached."""
        return self._open.values()

    def _group(self, members: tuple[int, ...]) -> int:
        """Equal groups have one number. A long tuple's hash takes long, and Python forgets it."""
        known = self._tuples.get(id(members))
        if known is None:
            if len(self._tuples) >= _MOST_TUPLES:
                self._tuples.clear()
            known = self._tuples[id(members)] = members, self._groups.setdefault(members, len(self._groups))
        return known[1]


class Collectives:
    """Performs collectives: when the last member has called, the answers are made and the end is known."""

    def __init__(
        self,
        world: Clockwork,
        network: Network,
        cluster: Cluster,
        hosts: Sequence[int],
        processors: Processors,
        acting: Sequence[int] | None = None,
    ) -> None:
        self._world, self._network, self._cluster, self._hosts, self._acting = world, network, cluster, hosts, acting
        self._processors = processors
        self._meetings = Meetings(acting)

    def join(self, flight: Flight, op: Collective[Any]) -> None:
        """Let one member call."""
        world = self._world
        if self._acting is not None and len(op.members) != len(self._hosts):
            raise Asymmetric(f"{op} of {len(self._hosts)}")
        gone = next((member for member in op.members if member in world.lost), None) if world.lost else None
        if gone is not None:
            return world.fail(flight, gone)
        meeting, complete = self._meetings.join(flight, op)
        if meeting.clash is not None:
            world.at(world.now_s, lambda: self._call_off(meeting))
        elif complete:
            self._settle(meeting)

    def lose(self, rank: int) -> None:
        """Fail the operations that wait for a lost rank."""
        for flight in self._meetings.without(rank):
            self._world.fail(flight, rank)

    def open(self) -> Iterable[Meeting]:
        """Collectives that some members have not reached."""
        return self._meetings.open()

    def _answers(self, ops: Sequence[Collective[Any]]) -> list[Any]:
        """Answers of the acting ranks. Their sums contain the sums of the ranks that they act for."""
        first = ops[0]
        if self._acting is None or (isinstance(first, AllReduce) and not first.buffer.is_meta):
            return members_answers(ops)
        given = getattr(first, "buffer", None)
        if given is not None and not given.is_meta:
            raise Asymmetric(f"{first}, with other values on each rank")
        return empty_answers(ops, len(first.members))

    def _price(self, ops: Sequence[Collective[Any]]) -> tuple[float, float]:
        """Seconds of latencies, and of bytes."""
        first = ops[0]
        if self._cluster.in_bucket:
            cost, link = collective_cost(ops), self._cluster.network
            return cost.seconds(inf, link.latency_s), cost.seconds(link.bytes_per_s, 0.0)
        hosts = tuple(self._hosts[member] for member in first.members)
        link = self._cluster.slowest_link(hosts, first.kind, max(map(message_bytes, ops)))
        waiting_s = members_seconds(ops, link.latency_s, inf, self._acting)
        return waiting_s, members_seconds(ops, 0.0, link.bytes_per_s, self._acting)

    def _sent_bytes(self, ops: Sequence[Collective[Any]]) -> list[int]:
        if self._cluster.in_bucket:
            return sent_bytes(ops)
        if self._acting is None:
            return members_bytes(ops)
        return [member_bytes(op, rank) for rank, op in zip(self._acting, ops, strict=True)]

    def _call_off(self, meeting: Meeting) -> None:
        for flight, _ in list(meeting.arrived.values()):
            self._world.land(flight, None, meeting.clash)

    def _settle(self, meeting: Meeting) -> None:
        members = meeting.first.members
        ordered = [meeting.arrived[member] for member in self._acting or members]
        ops = [op for _, op in ordered]
        try:
            answers = self._answers(ops)
        except Mismatch as clash:
            meeting.clash = clash
            return self._world.at(self._world.now_s, lambda: self._call_off(meeting))
        waiting_s, busy_s = self._price(ops)
        end_s = self._network.meet(members, waiting_s, busy_s, self._world.now_s)
        kind, sent = meeting.first.kind, self._sent_bytes(ops)
        left = 1  # parts of the collective that are not over: its messages, and the kernels that handle them

        def over() -> None:
            nonlocal left
            left -= 1
            if not left:
                for (flight, _), answer, sent_bytes in zip(ordered, answers, sent, strict=True):
                    self._world.end(flight, kind, sent_bytes, answer)

        if self._processors.crowded:
            left += len(ordered)
            for (flight, op), sent_bytes in zip(ordered, sent, strict=True):
                use = KernelUse(COLLECTIVE.format(kind=kind), num_rounds(op), sent_bytes)
                self._processors.handle_beside(flight.rank, use, over)
        self._world.at(end_s, over)
