"""What is under way in a virtual world: operations, coroutines, and collectives that some members have reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from polytempo.core import WAITING, Task
from polytempo.core.driver import Begin
from polytempo.core.op import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Collective, ReduceScatter


class Asymmetric(Exception):
    """Ranks that were to act for all others do what not all ranks do alike."""


class Flight(msgspec.Struct, eq=False):
    """One operation, or one started coroutine, under way."""

    op: object
    rank: int
    step: int
    started_s: float
    done: bool = False
    value: Any = None
    error: Exception | None = None
    waiters: tuple[Callable[[Any, Exception | None], None], ...] = ()
    """What to call with the answer."""

    def __str__(self) -> str:
        return str(self.op)


@dataclass(slots=True, eq=False)
class VirtualStrand:
    """A coroutine of a rank: its program, or something that it started."""

    task: Task[Any]
    flight: Flight
    main: bool
    waits_for: Flight | None = None
    begin: Begin = lambda op: WAITING
    """Begins an operation of this coroutine; see `Task.resume`."""
    go_on: Callable[[Any, Exception | None], None] = lambda value, error: None
    """Resumes this coroutine with an answer."""


@dataclass(slots=True, eq=False)
class Meeting:
    """A collective that some members have reached. `clash`: why it can never take place."""

    first_rank: int
    first: Collective[Any]
    facts: tuple[object, ...]
    arrived: dict[int, tuple[Flight, Collective[Any]]] = field(default_factory=dict)
    clash: Exception | None = None


def facts(op: Collective[Any]) -> tuple[object, ...]:
    """What all members of a collective must agree on, to compare."""
    match op:
        case AllReduce(buffer) | AllGather(buffer) | ReduceScatter(buffer):
            return type(op), buffer.shape, buffer.dtype
        case Broadcast(buffer, source):
            return Broadcast, buffer.shape, buffer.dtype, source
        case AllToAll(pieces, _):
            return AllToAll, pieces[0].dtype
    return (type(op),)


def signature(op: Collective[Any]) -> str:
    """What all members of a collective must agree on, to read."""
    match op:
        case AllReduce(buffer) | AllGather(buffer) | ReduceScatter(buffer):
            return f"{op.kind}({tuple(buffer.shape)} {buffer.dtype})"
        case Broadcast(buffer, source):
            return f"broadcast({tuple(buffer.shape)} {buffer.dtype} from rank {source})"
        case AllToAll(pieces, _):
            return f"all_to_all({pieces[0].dtype})"
        case Barrier():
            return "barrier()"
    raise TypeError(f"{op!r} is no collective of a world")


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
