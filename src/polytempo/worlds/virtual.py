"""The virtual world: a heap of events and a clock that jumps. One thread, any number of ranks.

Every rank is a coroutine. When it awaits an operation, the world works out when that operation ends,
puts its end on the heap, and goes on with whatever ends next:

    heap  (0.0012 s, rank 3: recv)  (0.0013 s, rank 0: compute)  ...
            │ pop the earliest, set the clock to it, resume its rank until the next await
            ▼
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from polytempo.cluster import Cluster, Crash, Link, Pause
from polytempo.core import Deadlock, Mismatch, PeerLost, Port, TimedOut, world_port
from polytempo.core.op import (
    AllGather,
    AllReduce,
    Barrier,
    Broadcast,
    Collective,
    Compute,
    Mark,
    Now,
    Op,
    Program,
    Recv,
    ReduceScatter,
    Send,
    Start,
    Work,
)
from polytempo.worlds.collective import member_bytes, member_seconds, members_answers
from polytempo.worlds.trace import Event, Trace

T = TypeVar("T")


class Outcome(NamedTuple, Generic[T]):
    """What a virtual run left."""

    results: list[T | None]
    """What each rank's program returned; None for a rank that died."""
    seconds: float
    """Virtual time at which the last rank finished."""
    trace: Trace
    errors: dict[int, BaseException]
    """The uncaught error of each rank that had one."""
    unreceived: int
    """Messages that were sent and never received."""


class _Flight:
    """One operation, or one started coroutine, under way."""

    __slots__ = ("done", "error", "op", "rank", "started_s", "step", "value", "waiters")

    def __init__(self, op: object, rank: int, step: int, started_s: float) -> None:
        self.op, self.rank, self.step, self.started_s = op, rank, step, started_s
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.waiters: list[_Strand] = []

    def __str__(self) -> str:
        return str(self.op)


class _Strand:
    """A coroutine of a rank: its program, or something that it started."""

    __slots__ = ("coroutine", "flight", "main", "waits_for")

    def __init__(self, coroutine: Program[Any], flight: _Flight, main: bool) -> None:
        self.coroutine, self.flight, self.main = coroutine, flight, main
        self.waits_for: _Flight | None = None


class _Meeting(NamedTuple):
    """A collective that some members have reached."""

    first: Collective[Any]
    arrived: dict[int, tuple[_Flight, Collective[Any]]]


class VirtualWorld:
    """`num_ranks` ranks on a `cluster`. Same arguments, same trace, to the bit.

    A world runs one program; make another for another run.
    """

    def __init__(self, cluster: Cluster, num_ranks: int, *, seed: int = 0, max_events: int = 200_000) -> None:
        if num_ranks < 1:
            raise ValueError(f"a world needs at least one rank, got {num_ranks}")
        self.cluster = cluster
        self.hosts = cluster.hosts(num_ranks)
        self.size = num_ranks
        self.now_s = 0.0
        self.trace = Trace(timed=True, max_events=max_events)
        self._heap: list[tuple[float, int, _Flight | None, Callable[[], None]]] = []
        self._pushed = 0
        self._random = [Random(f"{seed}/{rank}") for rank in range(num_ranks)]
        self._step = [0] * num_ranks
        self._lost: dict[int, float] = {}
        self._strands: list[list[_Strand]] = [[] for _ in range(num_ranks)]
        self._mail: dict[tuple[int, int, int, int], deque[Tensor]] = defaultdict(deque)
        self._receivers: dict[tuple[int, int, int, int], deque[_Flight]] = defaultdict(deque)
        self._meetings: dict[tuple[tuple[int, ...], int, int], _Meeting] = {}
        self._calls: dict[tuple[tuple[int, ...], int, int], int] = defaultdict(int)
        self._egress: dict[tuple[str, int], float] = defaultdict(float)
        self._ingress: dict[tuple[str, int], float] = defaultdict(float)
        self._free_s = [0.0] * num_ranks
        self._results: list[Any] = [None] * num_ranks
        self._errors: dict[int, BaseException] = {}
        self._running = num_ranks

    # ------------------------------------------------------------------ running

    def port(self, rank: int) -> Port:
        """The door of world rank `rank`."""
        return world_port(rank, self.hosts)

    def run(self, program: Callable[[Port], Coroutine[Any, Any, T]], *, raises: bool = True) -> Outcome[T]:
        """Run `program(port)` on every rank until all have finished.

        Errors: the first uncaught error of a rank that an injected crash did not kill (with
        `raises=False` it is in the outcome instead); `Deadlock` when nobody can go on.
        """
        try:
            for rank in range(self.size):
                self._schedule_crashes(rank)
                flight = _Flight("program", rank, 0, 0.0)
                self._begin(_Strand(program(self.port(rank)), flight, main=True))
            while self._heap and self._running:
                time_s, _, flight_or_none, action = heapq.heappop(self._heap)
                if flight_or_none is not None and flight_or_none.done:
                    continue  # a deadline that was kept
                self.now_s = time_s
                action()
            if self._running:
                raise Deadlock(self._who_waits_for_what())
        finally:
            for strands in self._strands:
                for strand in strands:
                    strand.coroutine.close()
        if raises and self._errors:
            raise next(iter(self._errors.values()))
        unreceived = sum(len(box) for box in self._mail.values())
        return Outcome(self._results, self.now_s, self.trace, self._errors, unreceived)

    def _at(self, time_s: float, action: Callable[[], None], deadline_of: _Flight | None = None) -> None:
        heapq.heappush(self._heap, (time_s, self._pushed, deadline_of, action))
        self._pushed += 1

    def _begin(self, strand: _Strand) -> None:
        self._strands[strand.flight.rank].append(strand)
        self._resume(strand, None, None)

    def _resume(self, strand: _Strand, value: Any, error: BaseException | None) -> None:
        """Run a coroutine until it has to wait."""
        rank = strand.flight.rank
        strand.waits_for = None
        while rank not in self._lost:
            try:
                op = strand.coroutine.send(value) if error is None else strand.coroutine.throw(error)
            except StopIteration as stop:
                self._finish(strand, stop.value, None)
                return
            except Exception as uncaught:
                self._finish(strand, None, uncaught)
                return
            value, error = None, None
            match op:
                case Now():
                    value = self.now_s
                case Mark(step):
                    flight = self._mark(rank, step)
                    if flight is not None:
                        return self._wait(strand, flight)
                case Start(what):
                    value = Work(self._start(rank, what))
                case Work(flight) if flight.done:
                    value, error = flight.value, flight.error
                case Work(flight):
                    return self._wait(strand, flight)
                case _:
                    return self._wait(strand, self._issue(rank, op))

    def _wait(self, strand: _Strand, flight: _Flight) -> None:
        strand.waits_for = flight
        flight.waiters.append(strand)

    def _start(self, rank: int, what: Op[Any] | Program[Any]) -> _Flight:
        if isinstance(what, Op):
            return self._issue(rank, what)
        flight = _Flight("coroutine", rank, self._step[rank], self.now_s)
        self._begin(_Strand(what, flight, main=False))
        return flight

    def _finish(self, strand: _Strand, value: Any, error: BaseException | None) -> None:
        rank = strand.flight.rank
        self._strands[rank].remove(strand)
        if strand.main:
            self._results[rank] = value
            self._running -= 1
            if error is not None:
                self._errors[rank] = error
                self._lose(rank)
            return
        self._land(strand.flight, value, error)

    def _land(self, flight: _Flight, value: Any, error: BaseException | None) -> None:
        """An operation has its answer: resume whoever waits for it."""
        if flight.done or flight.rank in self._lost:
            return
        flight.done, flight.value, flight.error = True, value, error
        waiters, flight.waiters = flight.waiters, []
        for strand in waiters:
            self._resume(strand, value, error)

    # ------------------------------------------------------------------ operations

    def _issue(self, rank: int, op: Op[Any]) -> _Flight:
        flight = _Flight(op, rank, self._step[rank], self.now_s)
        if op.timeout_s is not None:
            late = TimedOut(rank, flight.step, str(op), op.timeout_s)
            self._at(self.now_s + op.timeout_s, lambda: self._land(flight, None, late), deadline_of=flight)
        match op:
            case Compute():
                self._compute(flight, op)
            case Send():
                self._send(flight, op)
            case Recv():
                self._recv(flight, op)
            case Collective():
                self._meet(flight, op)
            case _:
                raise TypeError(f"rank {rank} awaited {op!r}, which is no operation of a world")
        return flight

    def _end(self, flight: _Flight, kind: str, num_bytes: int, value: Any, peer: int = -1) -> None:
        """Land an operation now, and write its line in the trace."""
        if not flight.done and flight.rank not in self._lost:
            self.trace.add(Event(flight.rank, flight.step, kind, num_bytes, flight.started_s, self.now_s, peer))
        self._land(flight, value, None)

    def _compute(self, flight: _Flight, op: Compute[Any]) -> None:
        rank = flight.rank
        factor = self.cluster.stragglers(self._random[rank], self.hosts[rank])
        flight.started_s = max(self.now_s, self._free_s[rank])
        self._free_s[rank] = flight.started_s + op.flops / self.cluster.flops_per_s * factor
        value = op.work()
        self._at(self._free_s[rank], lambda: self._end(flight, "compute", 0, value))

    def _link(self, sender: int, receiver: int) -> tuple[Link, tuple[str, int], tuple[str, int]]:
        """The link between two ranks, and the two queues that its messages stand in."""
        if self.hosts[sender] == self.hosts[receiver]:
            return self.cluster.memory, ("rank", sender), ("rank", receiver)
        return self.cluster.network, ("host", self.hosts[sender]), ("host", self.hosts[receiver])

    def _send(self, flight: _Flight, op: Send) -> None:
        rank = flight.rank
        if op.to in self._lost:
            return self._fail(flight, op.to)
        link, out, into = self._link(rank, op.to)
        payload = op.buffer.detach().clone()
        num_bytes = payload.numel() * payload.element_size()
        busy_s = num_bytes / link.bytes_per_s
        begin_s = max(self.now_s, self._egress[out])
        self._egress[out] = begin_s + busy_s
        key = (rank, op.to, op.channel, op.tag)

        def first_byte_arrives() -> None:
            end_s = max(self.now_s, self._ingress[into]) + busy_s
            self._ingress[into] = end_s
            self._at(end_s, lambda: self._deliver(key, payload))

        self._at(begin_s + link.latency_s, first_byte_arrives)
        self._at(begin_s + busy_s, lambda: self._end(flight, "send", num_bytes, None, op.to))

    def _recv(self, flight: _Flight, op: Recv) -> None:
        key = (op.source, flight.rank, op.channel, op.tag)
        if self._mail[key]:
            payload = self._mail[key].popleft()
            self._at(self.now_s, lambda: self._hand_over(flight, payload))
        elif op.source in self._lost:
            self._fail(flight, op.source)
        else:
            self._receivers[key].append(flight)

    def _deliver(self, key: tuple[int, int, int, int], payload: Tensor) -> None:
        queue = self._receivers[key]
        while queue:
            flight = queue.popleft()
            if not flight.done:
                return self._hand_over(flight, payload)
        self._mail[key].append(payload)

    def _hand_over(self, flight: _Flight, payload: Tensor) -> None:
        op = flight.op
        assert isinstance(op, Recv)
        if payload.shape != op.like.shape or payload.dtype != op.like.dtype:
            return self._land(
                flight,
                None,
                Mismatch(
                    f"rank {flight.rank}, step {flight.step}: rank {op.source} sent "
                    f"{tuple(payload.shape)} {payload.dtype}, but {tuple(op.like.shape)} {op.like.dtype} was expected"
                ),
            )
        self._end(flight, "recv", 0, payload, op.source)

    def _meet(self, flight: _Flight, op: Collective[Any]) -> None:
        rank = flight.rank
        gone = next((member for member in op.members if member in self._lost), None)
        if gone is not None:
            return self._fail(flight, gone)
        call = self._calls[op.members, op.channel, rank]
        self._calls[op.members, op.channel, rank] += 1
        key = (op.members, op.channel, call)
        meeting = self._meetings.setdefault(key, _Meeting(op, {}))
        meeting.arrived[rank] = (flight, op)
        if _signature(op) != _signature(meeting.first):
            first_rank = next(iter(meeting.arrived))
            clash = Mismatch(
                f"step {flight.step}: rank {rank} calls {_signature(op)}, but rank {first_rank} calls "
                f"{_signature(meeting.first)} at the same place"
            )
            for other, _ in list(meeting.arrived.values()):
                self._land(other, None, clash)
            return None
        if len(meeting.arrived) == len(op.members):
            del self._meetings[key]
            self._settle(meeting)
        return None

    def _settle(self, meeting: _Meeting) -> None:
        ordered = [meeting.arrived[member] for member in meeting.first.members]
        answers = members_answers([op for _, op in ordered])
        link = self.cluster.slowest_link(tuple(self.hosts[member] for member in meeting.first.members))
        end_s = self.now_s + member_seconds(meeting.first, link.latency_s, link.bytes_per_s)
        for (flight, op), answer in zip(ordered, answers, strict=True):

            def end(flight: _Flight = flight, op: Collective[Any] = op, answer: Any = answer) -> None:
                self._end(flight, op.kind, member_bytes(op, flight.rank), answer)

            self._at(end_s, end)

    # ------------------------------------------------------------------ failures

    def _schedule_crashes(self, rank: int) -> None:
        for fault in self.cluster.faults:
            if isinstance(fault, Crash) and fault.rank == rank and fault.at_s is not None:
                self._at(fault.at_s, lambda: self._crash(rank))

    def _mark(self, rank: int, step: int) -> _Flight | None:
        """Set the rank's step. Returns something to wait for if a pause begins, or never ends (a crash)."""
        self._step[rank] = step
        for fault in self.cluster.faults:
            if fault.rank != rank or fault.step != step:
                continue
            if isinstance(fault, Crash):
                self._crash(rank)
            if isinstance(fault, Pause):
                return self._pause(rank, step, fault.seconds)
        return None

    def _pause(self, rank: int, step: int, seconds: float) -> _Flight:
        flight = _Flight("pause", rank, step, self.now_s)
        self._at(self.now_s + seconds, lambda: self._end(flight, "pause", 0, None))
        return flight

    def _crash(self, rank: int) -> None:
        if rank not in self._lost and any(strand.main for strand in self._strands[rank]):
            self._running -= 1
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        """A rank is gone: whoever needs it hears of it `detection_s` later."""
        self._lost[rank] = self.now_s
        for (source, _, _, _), flights in self._receivers.items():
            if source == rank:
                while flights:
                    self._fail(flights.popleft(), rank)
        for key, meeting in list(self._meetings.items()):
            if rank in key[0]:
                for flight, _ in meeting.arrived.values():
                    self._fail(flight, rank)
                del self._meetings[key]

    def _fail(self, flight: _Flight, peer: int) -> None:
        error = PeerLost(flight.rank, flight.step, str(flight.op), peer)
        self._at(self.now_s + self.cluster.detection_s, lambda: self._land(flight, None, error))

    def _who_waits_for_what(self) -> str:
        lines = [f"deadlock at {self.now_s:.6f} s: nobody can go on."]
        for rank, strands in enumerate(self._strands):
            for strand in strands:
                flight = strand.waits_for
                if rank not in self._lost and flight is not None:
                    since = f"step {flight.step}, since {flight.started_s:.6f} s"
                    missing = ""
                    if isinstance(flight.op, Collective):
                        arrived = next((m.arrived for m in self._meetings.values() if rank in m.arrived), {})
                        missing = f", without ranks {sorted(set(flight.op.members) - set(arrived))}"
                    lines.append(f"  rank {rank} waits for {flight.op}{missing} ({since})")
        return "\n".join(lines)


def _signature(op: Collective[Any]) -> str:
    match op:
        case AllReduce(buffer) | AllGather(buffer) | ReduceScatter(buffer):
            return f"{op.kind}({tuple(buffer.shape)} {buffer.dtype})"
        case Broadcast(buffer, source):
            return f"broadcast({tuple(buffer.shape)} {buffer.dtype} from rank {source})"
        case Barrier():
            return "barrier()"
    raise TypeError(f"{op!r} is no collective of a world")
