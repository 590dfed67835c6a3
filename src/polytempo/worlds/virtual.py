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
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from polytempo.cluster import Cluster, Crash, Pause
from polytempo.core import Deadlock, Mismatch, PeerLost, Port, TimedOut, world_port
from polytempo.core.op import Alone, Collective, Compute, Mark, Now, Op, Post, Program, Recv, Send, Start, Take, Work
from polytempo.worlds.collective import members_answers, members_bytes, members_seconds, num_bytes
from polytempo.worlds.mailbox import MessageQueues, NodeMailbox
from polytempo.worlds.meetings import Meetings
from polytempo.worlds.network import Network
from polytempo.worlds.operations import Flight, Meeting, Strand, who_waits_for_what
from polytempo.worlds.pace import Pace
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


class VirtualWorld:
    """`num_ranks` ranks on a `cluster`. Same arguments, same trace, to the bit.

    A world runs one program; make another for another run.
    """

    def __init__(self, cluster: Cluster, num_ranks: int, *, seed: int = 0, max_events: int = 200_000) -> None:
        if num_ranks < 1:
            raise ValueError(f"a world needs at least one rank, got {num_ranks}")
        for fault in cluster.faults:
            if not 0 <= fault.rank < num_ranks:
                raise ValueError(f"{fault} hits no rank of a world with {num_ranks} ranks")
        self.cluster = cluster
        self.hosts = cluster.hosts(num_ranks)
        self.size = num_ranks
        self.now_s = 0.0
        self.trace = Trace(timed=True, max_events=max_events)
        self._heap: list[tuple[float, int, Flight | None, Callable[[], None]]] = []
        self._pushed = 0
        self._pace = Pace(cluster.stragglers, self.hosts, seed)
        self._step = [0] * num_ranks
        self.lost: dict[int, float] = {}
        self._strands: list[list[Strand]] = [[] for _ in range(num_ranks)]
        self._sent: MessageQueues[tuple[int, int, int, int], Tensor] = MessageQueues()
        self._meetings = Meetings()
        self._network = Network(cluster, self.hosts)
        self._mail = NodeMailbox(self, self._network, num_ranks)
        self._alone: dict[int, deque[tuple[Flight, Alone[Any]]]] = defaultdict(deque)
        """Those who want to be alone on a host, in the order in which they asked; the first one is."""
        self._unreceived = 0
        self._free_s = [0.0] * num_ranks
        self._results: list[Any] = [None] * num_ranks
        self._errors: dict[int, BaseException] = {}
        self._running = num_ranks
        self._began = False

    # ------------------------------------------------------------------ running

    def port(self, rank: int) -> Port:
        """The door of world rank `rank`."""
        return world_port(rank, self.hosts)

    def run(self, program: Callable[[Port], Coroutine[Any, Any, T]], *, raises: bool = True) -> Outcome[T]:
        """Run `program(port)` on every rank until all have finished.

        Errors: the first uncaught error of a rank that an injected crash did not kill (with
        `raises=False` it is in the outcome instead); `Deadlock` when nobody can go on.
        """
        if self._began:
            raise ValueError("a virtual world runs one program; make another VirtualWorld for another run")
        self._began = True
        try:
            for rank in range(self.size):
                self._schedule_crashes(rank)
                flight = Flight("program", rank, 0, 0.0)
                self._begin(Strand(program(self.port(rank)), flight, main=True))
            while self._heap and self._running:
                time_s, _, flight_or_none, action = heapq.heappop(self._heap)
                if flight_or_none is not None and flight_or_none.done:
                    continue  # a deadline that was kept
                self.now_s = time_s
                action()
            if self._running:
                living = [[] if rank in self.lost else strands for rank, strands in enumerate(self._strands)]
                text = who_waits_for_what(self.now_s, living, self._meetings.open())
                raise Deadlock(text) from next(iter(self._errors.values()), None)
        finally:
            for strands in self._strands:
                for strand in strands:
                    strand.coroutine.close()
        if raises and self._errors:
            raise next(iter(self._errors.values()))
        return Outcome(self._results, self.now_s, self.trace, self._errors, self._unreceived)

    def at(self, time_s: float, action: Callable[[], None], deadline_of: Flight | None = None) -> None:
        """Do `action` at `time_s`; not if it is the deadline of an operation that is over by then."""
        heapq.heappush(self._heap, (time_s, self._pushed, deadline_of, action))
        self._pushed += 1

    def _begin(self, strand: Strand) -> None:
        self._strands[strand.flight.rank].append(strand)
        self._resume(strand, None, None)

    def _resume(self, strand: Strand, value: Any, error: BaseException | None) -> None:
        """Run a coroutine until it has to wait."""
        rank = strand.flight.rank
        strand.waits_for = None
        while rank not in self.lost:
            try:
                op = strand.coroutine.send(value) if error is None else strand.coroutine.throw(error)
            except StopIteration as stop:
                self._finish(strand, stop.value, None)
                return
            except Exception as uncaught:
                self._finish(strand, None, uncaught)
                return
            value, error = None, None
            try:
                match op:
                    case Compute() | Collective():
                        return self._wait(strand, self._issue(rank, op))
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
            except TypeError as no_operation:
                error = no_operation

    def _wait(self, strand: Strand, flight: Flight) -> None:
        strand.waits_for = flight
        flight.waiters.append(strand)

    def _start(self, rank: int, what: Op[Any] | Program[Any]) -> Flight:
        if isinstance(what, Op):
            return self._issue(rank, what)
        flight = Flight("coroutine", rank, self._step[rank], self.now_s)
        self._begin(Strand(what, flight, main=False))
        return flight

    def _finish(self, strand: Strand, value: Any, error: BaseException | None) -> None:
        rank = strand.flight.rank
        self._strands[rank].remove(strand)
        if strand.main:
            self._results[rank] = value
            self._running -= 1
            self._mail.close(rank)
            if error is not None:
                self._errors[rank] = error
                self._lose(rank)
            return
        self._land(strand.flight, value, error)

    def _land(self, flight: Flight, value: Any, error: BaseException | None) -> None:
        """An operation has its answer: resume whoever waits for it."""
        if flight.done or flight.rank in self.lost:
            return
        flight.done, flight.value, flight.error = True, value, error
        waiters, flight.waiters = flight.waiters, []
        for strand in waiters:
            self._resume(strand, value, error)

    # ------------------------------------------------------------------ operations

    def _issue(self, rank: int, op: Op[Any]) -> Flight:
        flight = Flight(op, rank, self._step[rank], self.now_s)
        if op.timeout_s is not None:
            late = TimedOut(rank, flight.step, str(op), op.timeout_s)
            self.at(self.now_s + op.timeout_s, lambda: self._land(flight, None, late), deadline_of=flight)
        match op:
            case Alone():
                queue = self._alone[self.hosts[rank]]
                queue.append((flight, op))
                if len(queue) == 1:
                    self._let_in(queue)
            case Compute():
                self._compute(flight, op)
            case Send():
                self._send(flight, op)
            case Recv():
                self._recv(flight, op)
            case Collective():
                self._meet(flight, op)
            case Post():
                self._mail.post(flight, op)
            case Take():
                self._mail.take(flight, op)
            case _:
                raise TypeError(f"rank {rank} awaited {op!r}, which is no operation of a world")
        return flight

    def end(
        self,
        flight: Flight,
        kind: str,
        sent_bytes: int,
        value: Any,
        peer: int = -1,
        error: BaseException | None = None,
    ) -> None:
        """Land an operation now, and write its line in the trace."""
        if not flight.done and flight.rank not in self.lost:
            self.trace.add(Event(flight.rank, flight.step, kind, sent_bytes, flight.started_s, self.now_s, peer))
        self._land(flight, value, error)

    def _compute(self, flight: Flight, op: Compute[Any]) -> None:
        rank = flight.rank
        flight.started_s = max(self.now_s, self._free_s[rank])
        self._free_s[rank] = flight.started_s + op.flops / self.cluster.flops_per_s * self._pace.factor(rank)
        value, error = None, None
        try:
            value = op.work()
        except Exception as raised:
            error = raised
        self.at(self._free_s[rank], lambda: self.end(flight, "compute", 0, value, error=error))

    def _let_in(self, queue: deque[tuple[Flight, Alone[Any]]]) -> None:
        """Let the first who still waits compute alone, and the next one when that is over."""
        while queue and (queue[0][0].done or queue[0][0].rank in self.lost):
            queue.popleft()
        if queue:
            self._compute(*queue[0])

            def leave() -> None:
                queue.popleft()
                self._let_in(queue)

            self.at(self._free_s[queue[0][0].rank], leave)

    def _send(self, flight: Flight, op: Send) -> None:
        rank = flight.rank
        if op.to in self.lost:
            return self._fail(flight, op.to)
        payload = op.buffer.detach().clone()
        sent_bytes = num_bytes(payload)
        passage = self._network.send(rank, op.to, sent_bytes, self.now_s)
        key = (rank, op.to, op.channel, op.tag)
        self._unreceived += 1

        def first_byte_arrives() -> None:
            self.at(self._network.receive(passage, self.now_s), lambda: self._deliver(key, payload))

        self.at(passage.reaches_s, first_byte_arrives)
        self.at(passage.left_s, lambda: self.end(flight, "send", sent_bytes, None, op.to))

    def _recv(self, flight: Flight, op: Recv) -> None:
        key = (op.source, flight.rank, op.channel, op.tag)
        payload = self._sent.ask(key, flight)
        if payload is not None:
            self.at(self.now_s, lambda: self._hand_over(flight, payload))
        elif op.source in self.lost:  # what it sent before may still arrive in time
            self._fail(flight, op.source)

    def _deliver(self, key: tuple[int, int, int, int], payload: Tensor) -> None:
        flight = self._sent.arrive(key, payload)
        if flight is not None:
            self._hand_over(flight, payload)

    def _hand_over(self, flight: Flight, payload: Tensor) -> None:
        op = flight.op
        assert isinstance(op, Recv)
        self._unreceived -= 1
        if payload.shape != op.like.shape or payload.dtype != op.like.dtype:
            return self._land(
                flight,
                None,
                Mismatch(
                    f"rank {flight.rank}, step {flight.step}: rank {op.source} sent "
                    f"{tuple(payload.shape)} {payload.dtype}, but {tuple(op.like.shape)} {op.like.dtype} was expected"
                ),
            )
        self.end(flight, "recv", 0, payload, op.source)

    def _meet(self, flight: Flight, op: Collective[Any]) -> None:
        gone = next((member for member in op.members if member in self.lost), None) if self.lost else None
        if gone is not None:
            return self._fail(flight, gone)
        meeting, complete = self._meetings.join(flight, op)
        if meeting.clash is not None:
            self.at(self.now_s, lambda: self._call_off(meeting))
        elif complete:
            self._settle(meeting)

    def _call_off(self, meeting: Meeting) -> None:
        for flight, _ in list(meeting.arrived.values()):
            self._land(flight, None, meeting.clash)

    def _settle(self, meeting: Meeting) -> None:
        ordered = [meeting.arrived[member] for member in meeting.first.members]
        ops = [op for _, op in ordered]
        answers = members_answers(ops)
        members = meeting.first.members
        link = self.cluster.slowest_link(tuple(self.hosts[member] for member in members))
        waiting_s = members_seconds(ops, link.latency_s, inf)
        busy_s = members_seconds(ops, 0.0, link.bytes_per_s)
        end_s = self._network.meet(members, waiting_s, busy_s, self.now_s)
        kind, sent = meeting.first.kind, members_bytes(ops)

        def end() -> None:
            for (flight, _), answer, sent_bytes in zip(ordered, answers, sent, strict=True):
                self.end(flight, kind, sent_bytes, answer)

        self.at(end_s, end)

    # ------------------------------------------------------------------ failures

    def _schedule_crashes(self, rank: int) -> None:
        for fault in self.cluster.faults:
            if isinstance(fault, Crash) and fault.rank == rank and fault.at_s is not None:
                self.at(fault.at_s, lambda: self._crash(rank))

    def _mark(self, rank: int, step: int) -> Flight | None:
        """Set the rank's step. Returns something to wait for if a pause begins, or never ends (a crash)."""
        self._step[rank] = step
        self._pace.begin(rank, step)
        for fault in self.cluster.faults:
            if fault.rank != rank or fault.step != step:
                continue
            if isinstance(fault, Crash):
                self._crash(rank)
            if isinstance(fault, Pause):
                return self._pause(rank, step, fault.seconds)
        return None

    def _pause(self, rank: int, step: int, seconds: float) -> Flight:
        flight = Flight("pause", rank, step, self.now_s)
        self.at(self.now_s + seconds, lambda: self.end(flight, "pause", 0, None))
        return flight

    def _crash(self, rank: int) -> None:
        if rank not in self.lost and any(strand.main for strand in self._strands[rank]):
            self._running -= 1
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        """A rank is gone: whoever needs it hears of it `detection_s` after its death."""
        self.lost[rank] = self.now_s
        self._mail.close(rank)
        for (source, _, _, _), flight in self._sent.asking():
            if source == rank:
                self._fail(flight, rank)
        for flight in self._meetings.without(rank):
            self._fail(flight, rank)

    def _fail(self, flight: Flight, peer: int) -> None:
        error = PeerLost(flight.rank, flight.step, str(flight.op), peer)
        known_s = max(self.now_s, self.lost[peer] + self.cluster.detection_s)
        self.at(known_s, lambda: self._land(flight, None, error), deadline_of=flight)
