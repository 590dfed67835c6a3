"""The virtual world: a heap of events and a clock that jumps. One thread, any number of ranks.

Every rank is a coroutine. When it awaits an operation, the world computes the end of that operation, puts it on the
heap, and goes on with the next end:

    heap  (0.0012 s, rank 3: recv)  (0.0013 s, rank 0: compute)  ...
            │ pop the earliest, set the clock to it, resume its rank until the next await
            ▼
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from polytempo.cluster import Cluster, Crash, Pause
from polytempo.core import WAITING, Deadlock, PeerLost, Port, Task, TimedOut, world_port
from polytempo.core.op import (
    COLLECTIVES,
    Alone,
    Collective,
    Compute,
    Dispatch,
    LentRecv,
    LentSend,
    Mark,
    Now,
    Op,
    Post,
    Program,
    Recv,
    Send,
    SendReceive,
    Start,
    Take,
    WholeSum,
    Work,
)
from polytempo.worlds.object_store.round_cost import RequestSeries
from polytempo.worlds.trace import Line, Trace
from polytempo.worlds.virtual.clockwork import Agenda, Asymmetric, Flight, VirtualStrand
from polytempo.worlds.virtual.meetings import Collectives, who_waits_for_what
from polytempo.worlds.virtual.network import Network
from polytempo.worlds.virtual.processors import Processors
from polytempo.worlds.virtual.rare_collection import collecting_rarely
from polytempo.worlds.virtual.virtual_messages import Messages, NodeMailbox
from polytempo.worlds.virtual.whole_sums import WholeSums

T = TypeVar("T")


class Outcome(NamedTuple, Generic[T]):
    """The outcome of a virtual run."""

    results: list[T | None]
    """The value of each rank's program; None for a rank that died."""
    seconds: float
    """Virtual time until the last rank has finished."""
    trace: Trace
    errors: dict[int, BaseException]
    """The uncaught error of each rank that had one."""
    unreceived: int
    """Messages that were sent and never received."""


class VirtualWorld:
    """`num_ranks` ranks on a `cluster`. Same arguments, same trace, to the bit.

    A world runs one program; make another for another run.

    `whole_sums`: sums of tensors without values pass in one operation (`worlds.virtual.whole_sums`); the trace then has
    one line for each rank's messages. `run` raises `Contended` if this is not exact.
    `acting`: the ranks that run their programs; the others do the same at the same times (`worlds.virtual.symmetry`
    checks that they do).
    `groups`: all ranks, in groups with the first acting so; lines of the trace are written for all. There are values,
    and the sums of an acting rank are its group's sums (`runs.simulated.in_step`).
    """

    def __init__(
        self,
        cluster: Cluster,
        num_ranks: int,
        *,
        seed: int = 0,
        max_events: int = 200_000,
        acting: Sequence[int] | None = None,
        whole_sums: bool = False,
        groups: Sequence[range] = (),
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"a world needs at least one rank, got {num_ranks}")
        for fault in cluster.faults:
            if not 0 <= fault.rank < num_ranks:
                raise ValueError(f"{fault} hits no rank of a world with {num_ranks} ranks")
        acting = [group.start for group in groups] or acting
        self.cluster = cluster
        self.hosts = cluster.hosts(num_ranks)
        self.size = num_ranks
        self.now_s = 0.0
        self._clock = Now(lambda: self.now_s)
        self.trace = Trace(timed=True, max_events=max_events, groups={group.start: group for group in groups})
        self._agenda = Agenda()
        self.at, self.at_deadline = self._agenda.add, self._agenda.add_deadline
        self._step = [0] * num_ranks
        self.lost: dict[int, float] = {}
        self._strands: list[list[VirtualStrand]] = [[] for _ in range(num_ranks)]
        network = Network(cluster, self.hosts)
        self._processors = Processors(self, cluster, self.hosts, seed)
        self._messages = Messages(self, network, self._processors)
        self._collectives = Collectives(self, network, cluster, self.hosts, self._processors, acting)
        self._whole_sums = WholeSums(self, network, self.trace, acting) if whole_sums else None
        self._mail = NodeMailbox(self, network, self._processors, num_ranks)
        self._results: list[Any] = [None] * num_ranks
        self._errors: dict[int, BaseException] = {}
        self._all_act, self._acting = acting is None, range(num_ranks) if acting is None else acting
        self._running = len(self._acting)
        self._began = False
        self._issuing: dict[type, Callable[[Flight, Any], None]] = {
            Alone: self._processors.compute_alone,
            Compute: self._processors.compute,
            SendReceive: self._send_receive,
            Post: self._mail.post,
            Take: self._mail.take,
            **dict.fromkeys((Send, LentSend), self._messages.send),
            **dict.fromkeys((Recv, LentRecv), self._messages.recv),
            **dict.fromkeys((*COLLECTIVES, RequestSeries), self._collectives.join),
        }
        """The method that performs each kind of operation."""
        if self._whole_sums is not None:
            self._issuing[WholeSum] = self._whole_sums.join

    def computed_s(self, rank: int) -> float:
        """Seconds that `rank` has computed so far."""
        return self._processors.computed_s[rank]

    # ------------------------------------------------------------------ running

    def port(self, rank: int) -> Port:
        """The port of world rank `rank`."""
        return world_port(rank, self.hosts, self._clock)

    def run(self, program: Callable[[Port], Coroutine[Any, Any, T]], *, raises: bool = True) -> Outcome[T]:
        """Run `program(port)` on every rank until all have finished.

        Errors: the first uncaught error of a rank that an injected crash did not kill (with
        `raises=False` it is in the outcome instead); `Deadlock` when no rank can go on.
        """
        if self._began:
            raise ValueError("a virtual world runs one program; make another VirtualWorld for another run")
        self._began = True
        try:
            with collecting_rarely():
                self._run_all(program)
        finally:
            for strands in self._strands:
                for strand in strands:
                    strand.task.coroutine.close()
        if raises and self._errors:
            raise next(iter(self._errors.values()))
        return Outcome(self._results, self.now_s, self.trace, self._errors, self._messages.unreceived)

    def _run_all(self, program: Callable[[Port], Coroutine[Any, Any, T]]) -> None:
        for rank in self._acting:
            self._schedule_crashes(rank)
            flight = Flight("program", rank, 0, 0.0)
            self._begin(VirtualStrand(Task(program(self.port(rank))), flight, main=True))
        agenda, pop = self._agenda, heapq.heappop
        events, deadlines = agenda.events, agenda.deadlines
        while self._running and (events or deadlines):
            late = deadlines and not (events and events[0] < deadlines[0])
            entry = agenda.earliest_deadline() if late else pop(events)
            if entry is not None:
                self.now_s, _, action = entry
                action()
        if self._running:
            living = [[] if rank in self.lost else strands for rank, strands in enumerate(self._strands)]
            text = who_waits_for_what(self.now_s, living, self._collectives.open())
            raise Deadlock(text) from next(iter(self._errors.values()), None)

    # ------------------------------------------------------------------ coroutines

    def _begin(self, strand: VirtualStrand) -> None:
        self._strands[strand.flight.rank].append(strand)
        strand.begin, strand.go_on = partial(self._answer, strand), partial(self._resume, strand)
        self._resume(strand, None, None)

    def _resume(self, strand: VirtualStrand, value: Any, error: Exception | None) -> None:
        strand.waits_for = None
        if strand.flight.rank not in self.lost and strand.task.resume(strand.begin, value, error):
            self._finish(strand)

    def _answer(self, strand: VirtualStrand, op: Op[Any]) -> Any:
        """Begin an operation: its answer, or WAITING until its flight lands. A rank that it kills waits for ever."""
        rank = strand.flight.rank
        if type(op) in self._issuing:
            strand.waits_for = flight = self._issue(rank, op)
            flight.waiters += (strand.go_on,)
            return WAITING
        match op:
            case Dispatch():
                return self._mail.dispatch(rank, self._step[rank], op)
            case Now():
                return self.now_s
            case Mark(step):
                pause = self._mark(rank, step)
                return self._wait(strand, pause) if pause is not None else WAITING if rank in self.lost else None
            case Start(what):
                work: Work[Any] = Work(self._start(rank, what))
                return WAITING if rank in self.lost else work
            case WholeSum():
                return False
            case Work(flight) if flight.error is not None:
                raise flight.error
            case Work(flight) if flight.done:
                return flight.value
            case Work(flight):
                return self._wait(strand, flight)
        raise _unknown(rank, op)

    def _wait(self, strand: VirtualStrand, flight: Flight) -> Any:
        strand.waits_for = flight
        flight.waiters += (strand.go_on,)
        return WAITING

    def _start(self, rank: int, what: Op[Any] | Program[Any]) -> Flight:
        if isinstance(what, Op):
            return self._issue(rank, what)
        flight = Flight("coroutine", rank, self._step[rank], self.now_s)
        self._begin(VirtualStrand(Task(what), flight, main=False))
        return flight

    def _finish(self, strand: VirtualStrand) -> None:
        rank, task = strand.flight.rank, strand.task
        self._strands[rank].remove(strand)
        del strand.begin, strand.go_on  # which refer to it
        if not strand.main:
            return self.land(strand.flight, task.value, task.error)
        self._results[rank] = task.value
        self._running -= 1
        self._mail.close(rank)
        if task.error is not None:
            self._errors[rank] = task.error
            self._lose(rank)

    def land(self, flight: Flight, value: Any, error: Exception | None) -> None:
        """Deliver an operation's answer: resume its waiting coroutine."""
        if flight.done or flight.rank in self.lost:
            return
        flight.done, flight.value, flight.error = True, value, error
        waiters, flight.waiters = flight.waiters, ()
        for answer in waiters:
            answer(value, error)

    # ------------------------------------------------------------------ operations

    def _alike(self, op: Op[Any]) -> bool:
        """True if an operation takes all ranks as long as the acting ones."""
        computes = isinstance(op, Compute) and not isinstance(op, Alone)
        return not self._processors.crowded and (computes or isinstance(op, Collective))

    def _issue(self, rank: int, op: Op[Any]) -> Flight:
        perform = self._issuing.get(type(op))
        if perform is None:
            raise _unknown(rank, op)
        flight = Flight(op, rank, self._step[rank], self.now_s)
        if op.timeout_s is not None and not isinstance(op, SendReceive):  # its halves have the deadline
            late = TimedOut(rank, flight.step, str(op), op.timeout_s)
            self.at_deadline(self.now_s + op.timeout_s, flight, lambda: self.land(flight, None, late))
        if not self._all_act and not self._alike(op):
            raise Asymmetric(f"{op} of rank {rank}")
        perform(flight, op)
        return flight

    def _send_receive(self, flight: Flight, op: SendReceive) -> None:
        """Two messages with a line each in the trace; the pair is over when both are."""
        coming, going = [self._issue(flight.rank, half) for half in op.halves]

        def arrived(received: Any, error: Exception | None) -> None:
            if error is not None or going.done:
                return self.land(flight, received, error or going.error)
            going.waiters += (lambda _, error: self.land(flight, received, error),)

        coming.waiters += (arrived,)

    def end(
        self,
        flight: Flight,
        kind: str,
        sent_bytes: int,
        value: Any,
        peer: int = -1,
        error: Exception | None = None,
    ) -> None:
        """Land an operation now, and write its line in the trace."""
        rank = flight.rank
        if flight.done or rank in self.lost:
            return
        self.trace.add((rank, flight.step, kind, sent_bytes, flight.started_s, self.now_s, peer))
        flight.done, flight.value, flight.error = True, value, error
        waiters, flight.waiters = flight.waiters, ()
        for answer in waiters:
            answer(value, error)

    def write(self, event: Line) -> None:
        """Write a line in the trace for an operation that nothing waits for, unless its rank is gone."""
        if event[0] not in self.lost:
            self.trace.add(event)

    # ------------------------------------------------------------------ failures

    def _schedule_crashes(self, rank: int) -> None:
        for fault in self.cluster.faults:
            if isinstance(fault, Crash) and fault.rank == rank and fault.at_s is not None:
                self.at(fault.at_s, lambda: self._crash(rank))

    def _mark(self, rank: int, step: int) -> Flight | None:
        """Set the rank's step. Returns something to wait for if a pause begins, or never ends (a crash)."""
        self._step[rank] = step
        if self._all_act:
            self._processors.begin_step(rank, step)
        elif not self._processors.begin_step_alike(step):
            raise Asymmetric(f"step {step} with ranks that are not equally fast")
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
        """Note a lost rank: ranks that need it hear of it `detection_s` after its death."""
        self.lost[rank] = self.now_s
        self._mail.close(rank)
        self._messages.lose(rank)
        self._collectives.lose(rank)

    def fail(self, flight: Flight, peer: int) -> None:
        """Let `flight` fail, for it needs `peer`, which is gone; its rank hears of it when the death is detected."""
        error = PeerLost(flight.rank, flight.step, str(flight.op), peer)
        known_s = max(self.now_s, self.lost[peer] + self.cluster.detection_s)
        self.at_deadline(known_s, flight, lambda: self.land(flight, None, error))


def _unknown(rank: int, op: Op[Any]) -> TypeError:
    return TypeError(f"rank {rank} awaited {op!r}, which is not an operation of a world")
