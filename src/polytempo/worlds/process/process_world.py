"""The process world: performs the operations of one real rank through torch.distributed.

A coroutine advances when it is launched or waited for, in the order of the program. Every rank runs the same program,
so every rank issues its collectives in the same order, which the transports need. Where messages travel between hosts,
a thread goes on with the coroutines that were launched while the program computes (`worlds.process.progress_thread`).
The trace does not show when: each line stands as if the program had done everything itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store

from polytempo.core import Port, world_port
from polytempo.core.op import Alone, Collective, Compute, Mark, Now, Op, Program, Recv, Send, SendReceive, Start, Work
from polytempo.core.system.first_failure import FirstFailure
from polytempo.core.system.url_path import Place
from polytempo.device import StreamPauses, time_mark
from polytempo.native.group import Group
from polytempo.native.library import available
from polytempo.native.meeting import Unreachable
from polytempo.worlds.collective import member_bytes, num_bytes
from polytempo.worlds.process.lock import HostLock
from polytempo.worlds.process.progress_thread import ProgressThread
from polytempo.worlds.process.shares import (
    CommittedLoop,
    EpochSource,
    FollowingLoop,
    LoopWatch,
    Shares,
    StepListener,
)
from polytempo.worlds.process.strand import Pair, PendingOp, Strand, Wait
from polytempo.worlds.process.transport import Begun, Transport, group_timeout_s
from polytempo.worlds.trace import Event, Trace
from polytempo.worlds.trace_tail import tail_of

T = TypeVar("T")

_UNTIL_AWAITED = -1
"""The step of operations that the thread has begun: they belong to the step of the program's wait for them."""


class ProcessWorld:
    """One real rank of `group` (a process group or a backend), or of the initialised default one, or alone."""

    def __init__(self, rank: int, hosts: Sequence[int], *, group: Any = None, max_events: int = 20_000) -> None:
        self.rank, self.size = rank, len(hosts)
        self.transport = Transport(rank, self.size, group)
        self.progress = ProgressThread() if group is None and len(set(hosts)) > 1 else None
        """Advances coroutines while the program computes. On one host waiting for messages takes the cores that
        compute."""
        self.port: Port = world_port(rank, hosts)
        self.trace, self._max_events = Trace(timed=False, max_events=max_events), max_events
        self.step, self.waited_s = 0, 0.0
        """Seconds spent waiting for other ranks: the device's where one is in use, else the host's."""
        self._pauses = StreamPauses()
        self.shares = Shares()
        """This rank's parts of the batches that `pt.shard` yielded."""
        self.epoch_source: EpochSource | None = None
        """The loop that gets its batches from a parameter server; None: every rank takes its own part."""
        self.loop_watch: LoopWatch | None = None
        """Callbacks of a loop of one's own; None: it has none."""
        self.committed: CommittedLoop | None = None
        """The state of the loop in `pt.elastic`; None: another loop."""
        self.dealing: StepListener | None = None
        """Deals the batches of `pt.shard` by speed; None: equal parts."""
        self.follows: FollowingLoop | None = None
        """Sets the position of `pt.shard` where workers may be left out; None: they may not."""
        self.store: Store | None = None
        """The launcher's, where `pt.init()` has joined it."""
        self.life = 1
        """Processes of this rank so far in the run; from 2 on it is in no process group."""
        self.servers: ServerRanks | None = None
        """The launcher's processes that serve and do not train."""
        self.deaths: DeathReports | None = None
        """Names the first rank that failed, where another launcher than ours has started the ranks."""
        self.num_series = 0
        """Models that were attached or cut into stages so far; each has messages of its own."""
        self._zero_s = time.monotonic()
        self._lock: HostLock | None = None
        self._host_group: Group | None = None
        self._asked_for_host_group = False

    def now_s(self) -> float:
        """Seconds since the world's zero."""
        return time.monotonic() - self._zero_s

    def begin(self, out: Place | None = None) -> None:
        """Begin clock and trace together with all ranks. On one host their times are the same clock's.

        `out`: the run's folder, which has the last operations while the run goes on.
        """
        zero = torch.tensor([time.monotonic()], dtype=torch.float64)

        async def agree() -> float:
            await self.port.barrier()
            return float(await self.port.broadcast(zero))

        same_host = len(set(self.port.hosts)) == 1
        agreed_s = self.drive(agree())
        self._zero_s = agreed_s if same_host else time.monotonic()
        self.trace = Trace(timed=False, max_events=self._max_events)
        self.trace.show_in(tail_of(out, self.rank))
        self.waited_s = 0.0

    # ------------------------------------------------------------------ coroutines

    def drive(self, coroutine: Program[T]) -> T:
        """Run a coroutine to its end."""
        value: T = Strand(self, coroutine).wait()
        return value

    def launch(self, coroutine: Program[Any]) -> Strand:
        """Run a coroutine until it has to wait; `wait()` on the returned value finishes it."""
        strand = Strand(self, coroutine, self.progress)
        if self.progress is None:
            strand.advance(block=False)
            return strand
        with self.progress.changed:
            strand.advance(block=False)
            if not strand.done:
                self.progress.add(strand)
        return strand

    @property
    def in_program(self) -> bool:
        """True if the program itself calls this, not the thread that goes on meanwhile."""
        return self.progress is None or self.progress.here() is None

    @staticmethod
    def waits_for(answer: Any) -> bool:
        """True if the result of `perform` has to be waited for."""
        return isinstance(answer, PendingOp | Pair | Strand)

    # ------------------------------------------------------------------ operations

    def compute(self, work: Callable[[], T], name: str = "compute") -> T:
        """Run `work` and write its line in the trace, by this name."""
        start_s = self.now_s()
        try:
            return work()
        finally:
            self.record(name, start_s)

    @contextmanager
    def alone(self, timeout_s: float | None = None) -> Iterator[None]:
        """Inside, no other rank of this host is in `alone`. Raises TimedOut where its turn does not come in time."""
        if self.port.hosts.count(self.port.hosts[self.rank]) == 1:
            yield
            return
        limit_s = timeout_s or self.transport.timeout_s
        if self._lock is None:
            self._lock = HostLock(distributed_c10d._get_default_store(), self.port.hosts[self.rank])
        with self._lock.held(self, limit_s):
            yield

    def record(self, kind: str, start_s: float) -> None:
        """Write the line of something that this rank did from `start_s` until now."""
        now_s = self.now_s()
        self.write(self._event(kind, 0)._replace(start_s=min(start_s, now_s), end_s=now_s))  # `begin` moves the zero

    def write(self, event: Event) -> None:
        """Put a line into the trace; where the thread has done it, when the program waits for it."""
        strand = None if self.progress is None else self.progress.here()
        if strand is not None:
            strand.note(event)
        else:
            self.trace.add(event if event.step != _UNTIL_AWAITED else event._replace(step=self.step))

    def begin_wait(self) -> Wait:
        """The program or the thread begins to wait for other ranks."""
        return Wait(self.now_s(), time_mark() if self.in_program else None)

    def waited(self, wait: Wait) -> None:
        """The wait is over. The thread's waiting costs nothing."""
        if self.in_program:
            now = time_mark() if wait.mark is not None else None
            self.waited_s += self.now_s() - wait.since_s if now is None else self._pauses.add(wait.mark, now)

    def perform(self, op: Op[Any]) -> Any:
        """The answer to an operation, or an object to wait for."""
        match op:
            case Alone(work):
                with self.alone(op.timeout_s):
                    return self.compute(work)
            case Compute(work, _, name):
                return self.compute(work, name)
            case Now():
                return self.now_s()
            case Mark(step):
                self.step = step
                return None
            case Start(what):
                return Work(self.issue(what) if isinstance(what, Op) else self.launch(what))
            case Work(handle):
                return self._started(handle)
            case _:
                return self._started(self.issue(op))

    def issue(self, op: Op[Any]) -> PendingOp | Pair:
        """Begin an operation that other ranks take part in."""
        match op:
            case Send(buffer, to):
                event = self._event("send", num_bytes(buffer), to)
                return self._begun(op, event, self.transport.send)
            case Recv(_, source):
                return self._begun(op, self._event("recv", 0, source), self.transport.recv)
            case SendReceive():
                return self._send_receive(op)
            case Collective():
                event = self._event(op.kind, member_bytes(op, self.rank))
                return self._begun(op, event, self.transport.collective)
        raise TypeError(f"rank {self.rank} awaited {op!r}, which is not an operation of a world")

    @staticmethod
    def _started(awaited: Any) -> Any:
        """Begin an awaited operation that is held."""
        if isinstance(awaited, PendingOp | Pair):
            awaited.start()
        return awaited

    def _event(self, kind: str, sent_bytes: int, peer: int = -1) -> Event:
        now_s, step = self.now_s(), self.step if self.in_program else _UNTIL_AWAITED
        return Event(self.rank, step, kind, sent_bytes, now_s, now_s, peer)

    def _begun(self, op: Any, event: Event, begin: Callable[[Any], Begun]) -> PendingOp:
        try:
            return PendingOp(self, op, event, begin(op))
        except RuntimeError as error:
            raise self.translated(op, event, error) from error

    def _send_receive(self, op: SendReceive) -> Pair:
        recv, send = op.halves
        came, went = self._event("recv", 0, op.source), self._event("send", num_bytes(op.buffer), op.to)
        return Pair(self._begun(recv, came, self.transport.recv), self._begun(send, went, self.transport.send))

    def translated(self, op: Op[Any], event: Event, error: RuntimeError) -> Exception:
        """A transport's error in the words that both worlds use."""
        step = self.step if event.step == _UNTIL_AWAITED else event.step
        return self.transport.translated(op, step, event.peer, error)

    def forget_groups(self) -> None:
        """Let go of groups, so that their transport can end. The world is of no use afterwards."""
        if self.progress is not None:
            self.progress.close()
        self.transport.forget()
        self._host_group, self._asked_for_host_group = None, True

    @property
    def reads_arenas(self) -> bool:
        """True if the transport reads tensors in shared memory in place, so that it pays to have them there."""
        return self.size > 1 and isinstance(getattr(self.transport.whole, "group", None), Group)

    def host_group(self) -> Group | None:
        """All ranks as a group that shares memory; None where they are on several hosts or lack the native core.

        All ranks must call it, and all get a group or none does.
        """
        if not self._asked_for_host_group:
            self._asked_for_host_group = True
            has_core = torch.tensor([float(self.size > 1 and available() and len(set(self.port.hosts)) == 1)])

            async def how_many() -> float:
                return float(await self.port.all_reduce(has_core))

            if self.drive(how_many()) == self.size:
                self._host_group = shared_by_all(self.rank, self.size, group_timeout_s())
        return self._host_group


class DeathReports(Protocol):
    """The watch over the ranks' deaths (`engines.deaths.watch`)."""

    def settle(self, error: BaseException) -> FirstFailure | None:
        """The first failure of the run that `error` ends on this rank; None where the process was asked to end."""

    def report(self, error: BaseException) -> object:
        """Write the line of the first failure for this process, which `error` ends."""

    def on_death(self, take: Callable[[FirstFailure], object]) -> None:
        """Call `take` once with the first failure."""

    def tolerate(self) -> None:
        """Other ranks train on after the end of a rank."""


_current: list[ProcessWorld] = []


def current() -> ProcessWorld:
    """The world that `pt.init()` joined, or a world of one."""
    if not _current:
        _current.append(ProcessWorld(rank=0, hosts=(0,)))
    return _current[0]


def set_current(world: ProcessWorld | None) -> None:
    """Make `world` the value of `current` (None: forget it)."""
    _current[:] = [] if world is None else [world]


def beside(world: ProcessWorld) -> ProcessWorld:
    """The ranks of `world` with another trace and time of waiting, so that the run's are the same with and without.

    All ranks must still begin their collectives in the same order, over both worlds together.
    """
    other = ProcessWorld(world.rank, world.port.hosts, group=world.transport.group, max_events=0)
    other.transport.share_groups(world.transport)  # of a mesh's axes: made once
    return other


_number = itertools.count()  # every rank makes them in the same order, so the same number means the same group


def shared_by_all(rank: int, size: int, timeout_s: float) -> Group | None:
    """A group of all ranks; None where they cannot map each other's memory. All ranks call it, and get the same."""
    store = PrefixStore(f"polytempo/host/{next(_number)}", _get_default_store())
    try:
        return Group(store, rank, size, timeout_s=timeout_s)
    except Unreachable:
        return None


class ServerRanks(NamedTuple):
    """A worker's facts of the servers. See `engines.join.server_ranks`."""

    ranks: tuple[int, ...]
    """Ranks in the launcher's numbers."""
    store: Store
    """The store where they wait for a ticket."""
    spread: bool
    """True if the launcher's processes are on several hosts."""

    def worker(self, rank: int) -> int:
        """The rank among workers of the launcher's `rank`; -1 for a server."""
        return -1 if rank in self.ranks else rank - sum(server < rank for server in self.ranks)
