"""The process world: performs the operations of one real rank through torch.distributed.

A coroutine advances only when it is launched or waited for, in the order of the program. Every rank
runs the same program, so every rank issues its collectives in the same order, which the transports need.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from polytempo.core import PeerLost, PolytempoError, Port, TimedOut, world_port
from polytempo.core.op import (
    AllGather,
    AllReduce,
    AllToAll,
    Alone,
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
from polytempo.native.group import Group
from polytempo.native.library import available
from polytempo.worlds.collective import member_bytes, num_bytes
from polytempo.worlds.host import shared_by_all
from polytempo.worlds.lock import HostLock
from polytempo.worlds.shares import Shares
from polytempo.worlds.trace import Event, Trace
from polytempo.worlds.wire_tag import wire_tag

T = TypeVar("T")

_LOST = re.compile(r"closed by peer|connection reset|broken pipe|socket closed|connection refused|remote process", re.I)
_LATE = re.compile(r"timed? ?out", re.I)


class _Pending:
    """An operation under way, or finished."""

    __slots__ = ("answer", "done", "error", "event", "op", "work", "world")

    def __init__(self, world: ProcessWorld, op: Op[Any], event: Event, work: Any, answer: Callable[[], Any]) -> None:
        self.world, self.op, self.event, self.work, self.answer = world, op, event, work, answer
        self.done = work is None
        self.error: BaseException | None = None
        if self.done:
            world.trace.add(event._replace(end_s=world.now_s()))

    def wait(self) -> Any:
        """The operation's answer, once it is finished."""
        if not self.done:
            self.done = True
            since_s = self.world.now_s()
            try:
                limit_s = self.op.timeout_s
                self.work.wait(*([] if limit_s is None else [timedelta(seconds=limit_s)]))
            except RuntimeError as error:
                self.error = self.world.translated(self.op, self.event, error)
            end_s = self.world.now_s()
            self.world.waited_s += end_s - since_s
            self.world.trace.add(self.event._replace(end_s=end_s))
        if self.error is not None:
            raise self.error
        return self.answer()


class _Strand:
    """A coroutine under way, or finished."""

    __slots__ = ("coroutine", "done", "error", "value", "waits_for", "world")

    def __init__(self, world: ProcessWorld, coroutine: Program[Any]) -> None:
        self.world, self.coroutine = world, coroutine
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.waits_for: _Pending | _Strand | None = None

    def wait(self) -> Any:
        """What the coroutine returns, once it has."""
        self.advance(block=True)
        if self.error is not None:
            raise self.error
        return self.value

    def advance(self, *, block: bool) -> None:
        """Run until finished, or, without `block`, until something has to be waited for."""
        while not self.done:
            value, error = None, None
            if self.waits_for is not None:
                if not block and not self.waits_for.done:
                    return
                try:
                    value = self.waits_for.wait()
                except Exception as raised:
                    error = raised
                self.waits_for = None
            self._resume(value, error)

    def _resume(self, value: Any, error: BaseException | None) -> None:
        world = self.world
        while True:
            try:
                op = self.coroutine.send(value) if error is None else self.coroutine.throw(error)
            except StopIteration as stop:
                self.done, self.value = True, stop.value
                return
            except Exception as uncaught:
                self.done, self.error = True, uncaught
                return
            value, error = None, None
            try:
                match op:
                    case Alone(work, _):
                        with world.alone(op.timeout_s):
                            value = world.compute(work)
                    case Compute(work, _):
                        value = world.compute(work)
                    case Now():
                        value = world.now_s()
                    case Mark(step):
                        world.step = step
                    case Start(what):
                        value = Work(world.issue(what) if isinstance(what, Op) else world.launch(what))
                    case Work(handle):
                        self.waits_for = handle
                        return
                    case _:
                        self.waits_for = world.issue(op)
                        return
            except Exception as raised:  # at the await, as in the virtual world
                error = raised


class ProcessWorld:
    """One real rank of `group` (a process group or a backend), or of the initialised default one, or alone."""

    def __init__(self, rank: int, hosts: Sequence[int], *, group: Any = None, max_events: int = 20_000) -> None:
        self.rank, self.size, self._whole = rank, len(hosts), group
        self.port: Port = world_port(rank, hosts)
        self.trace, self._max_events = Trace(timed=False, max_events=max_events), max_events
        self.step, self.waited_s = 0, 0.0
        """Seconds spent waiting for other ranks."""
        self.share: float | None = None
        """This rank's part of the batch that `pt.shard` yielded last; None: equal parts."""
        self.shares = Shares()
        self._zero_s = time.monotonic()
        self._lock: HostLock | None = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self._host_group: Group | None = None
        self._asked_for_host_group = False

    def now_s(self) -> float:
        """Seconds since the world's zero."""
        return time.monotonic() - self._zero_s

    def begin(self) -> None:
        """Begin clock and trace together with all ranks. On one host their times are the same clock's."""
        zero = torch.tensor([time.monotonic()], dtype=torch.float64)

        async def agree() -> float:
            await self.port.barrier()
            return float(await self.port.broadcast(zero))

        same_host = len(set(self.port.hosts)) == 1
        agreed_s = self.drive(agree())
        self._zero_s = agreed_s if same_host else time.monotonic()
        self.trace = Trace(timed=False, max_events=self._max_events)
        self.waited_s = 0.0

    # ------------------------------------------------------------------ coroutines

    def drive(self, coroutine: Program[T]) -> T:
        """Run a coroutine to its end."""
        value: T = _Strand(self, coroutine).wait()
        return value

    def launch(self, coroutine: Program[Any]) -> _Strand:
        """Run a coroutine until it has to wait; `wait()` on what comes back finishes it."""
        strand = _Strand(self, coroutine)
        strand.advance(block=False)
        return strand

    # ------------------------------------------------------------------ operations

    def compute(self, work: Callable[[], T]) -> T:
        """Run `work` and write its line in the trace."""
        start_s = self.now_s()
        try:
            return work()
        finally:
            self.record("compute", start_s)

    @contextmanager
    def alone(self, timeout_s: float | None = None) -> Iterator[None]:
        """Inside, no other rank of this host is in `alone`. Raises TimedOut where its turn does not come in time."""
        if self.port.hosts.count(self.port.hosts[self.rank]) == 1:
            yield
            return
        limit_s = timeout_s or group_timeout_s(self._whole)
        if self._lock is None:
            self._lock = HostLock(distributed_c10d._get_default_store(), self.port.hosts[self.rank])
        since_s = self.now_s()
        entered = self._lock.acquire(limit_s)
        self.waited_s += self.now_s() - since_s
        if not entered:
            raise TimedOut(self.rank, self.step, "alone", limit_s)
        try:
            yield
        finally:
            self._lock.release()

    def record(self, kind: str, start_s: float) -> None:
        """Write the line of something that this rank did from `start_s` until now."""
        now_s = self.now_s()
        self.trace.add(Event(self.rank, self.step, kind, 0, min(start_s, now_s), now_s))  # `begin` moves the zero

    def issue(self, op: Op[Any]) -> _Pending:
        """Begin an operation."""
        start_s = self.now_s()
        try:
            if isinstance(op, Collective):
                event = Event(self.rank, self.step, op.kind, member_bytes(op, self.rank), start_s, start_s)
                return self._collective(op, event)
            return self._message(op, start_s)
        except RuntimeError as error:
            peer = op.to if isinstance(op, Send) else op.source if isinstance(op, Recv) else -1
            event = Event(self.rank, self.step, str(op), 0, start_s, start_s, peer)
            raise self.translated(op, event, error) from error

    def _message(self, op: Op[Any], start_s: float) -> _Pending:
        whole = self._group(self.port.members)
        match op:
            case Send(buffer, to, tag, channel):
                event = Event(self.rank, self.step, "send", num_bytes(buffer), start_s, start_s, to)
                work = whole.send([buffer.contiguous()], to, wire_tag(channel, tag)) if buffer.numel() else None
                return _Pending(self, op, event, work, lambda: None)
            case Recv(like, source, tag, channel):
                event = Event(self.rank, self.step, "recv", 0, start_s, start_s, source)
                into = torch.empty_like(like, memory_format=torch.contiguous_format)
                work = whole.recv([into], source, wire_tag(channel, tag)) if like.numel() else None
                return _Pending(self, op, event, work, lambda: into)
        raise TypeError(f"rank {self.rank} awaited {op!r}, which is no operation of a world")

    def _collective(self, op: Collective[Any], event: Event) -> _Pending:
        if len(op.members) == 1:
            return _Pending(self, op, event, None, lambda: _alone(op))
        group, ranks = self._group(op.members), sorted(op.members)
        match op:
            case AllReduce(buffer):
                work = group.allreduce([buffer], _options(AllreduceOptions, op))
                return _Pending(self, op, event, work, lambda: buffer)
            case Broadcast(buffer, source):
                options = _options(BroadcastOptions, op)
                options.rootRank = ranks.index(source)
                return _Pending(self, op, event, group.broadcast([buffer], options), lambda: buffer)
            case AllGather(buffer):
                gathered = [torch.empty_like(buffer) for _ in ranks]
                work = group.allgather([gathered], [buffer.contiguous()], _options(AllgatherOptions, op))
                order = [ranks.index(member) for member in op.members]
                return _Pending(self, op, event, work, lambda: [gathered[i] for i in order])
            case ReduceScatter(buffer):
                pieces = buffer.chunk(len(ranks))
                ordered = [pieces[op.members.index(member)] for member in ranks]
                mine = torch.empty_like(ordered[ranks.index(self.rank)])
                work = group.reduce_scatter([mine], [ordered], _options(ReduceScatterOptions, op))
                return _Pending(self, op, event, work, lambda: mine)
            case AllToAll(pieces, likes):
                ordered = [pieces[op.members.index(member)] for member in ranks]
                sizes = [likes[op.members.index(member)].numel() for member in ranks]
                arrived = pieces[0].new_empty(sum(sizes))
                work = group.alltoall_base(
                    *(arrived, torch.cat(ordered), sizes, [piece.numel() for piece in ordered]),
                    _options(AllToAllOptions, op),
                )
                order = [ranks.index(member) for member in op.members]
                return _Pending(self, op, event, work, lambda: [arrived.split(sizes)[i] for i in order])
            case Barrier():
                options = _options(BarrierOptions, op)
                options.device = torch.device("cpu")
                return _Pending(self, op, event, group.barrier(options), lambda: None)
        raise TypeError(f"rank {self.rank} awaited {op!r}, which is no collective of a world")

    def forget_groups(self) -> None:
        """Let go of groups, so that their transport can end. The world is of no use afterwards."""
        self._groups, self._whole = {}, None
        self._host_group, self._asked_for_host_group = None, True

    @property
    def reads_arenas(self) -> bool:
        """Whether the transport reads tensors in shared memory in place, so that it is worth having them there."""
        return self.size > 1 and isinstance(getattr(dist.group.WORLD, "group", None), Group)

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

    def _group(self, members: tuple[int, ...]) -> Any:
        if len(members) == self.size:
            return self._whole or dist.group.WORLD
        if self._whole is not None:
            raise ValueError(f"collectives of some ranks {members} need the default process group; use another route")
        if members not in self._groups:
            timeout = timedelta(seconds=group_timeout_s())
            self._groups[members] = dist.new_group(sorted(members), timeout, use_local_synchronization=True)
        return self._groups[members]

    def translated(self, op: Op[Any], event: Event, error: RuntimeError) -> Exception:
        """A transport's error in the words that both worlds use."""
        match error:
            case PeerLost(peer=lost, reason=reason):
                return PeerLost(self.rank, event.step, str(op), lost, reason)
            case TimedOut(timeout_s=timeout_s, reason=reason):
                return TimedOut(self.rank, event.step, str(op), timeout_s, reason)
            case PolytempoError():
                return error
        text = str(error)
        peer = event.peer if event.peer >= 0 else None
        if _LATE.search(text):
            return TimedOut(self.rank, event.step, str(op), op.timeout_s or group_timeout_s(self._whole))
        if _LOST.search(text):
            return PeerLost(self.rank, event.step, str(op), peer, text.splitlines()[0][:200])
        return error


def _options(kind: Callable[[], Any], op: Op[Any]) -> Any:
    options = kind()
    if op.timeout_s is not None:
        options.timeout = timedelta(seconds=op.timeout_s)
    return options


def _alone(op: Collective[Any]) -> Any:
    match op:
        case AllGather(buffer):
            return [buffer.clone()]
        case AllToAll(pieces, _):
            return [pieces[0].clone()]
        case Barrier():
            return None
        case AllReduce(buffer) | ReduceScatter(buffer) | Broadcast(buffer, _):
            return buffer
    raise TypeError(f"{op!r} is no collective of a world")


def group_timeout_s(group: Any = None) -> float:
    """The deadline that the process group (None: the default one) was made with."""
    world = group or dist.group.WORLD
    assert world is not None
    if isinstance(own := getattr(world, "timeout", None), timedelta):
        return own.total_seconds()
    backend = world._get_backend(world._device_types[0]) if isinstance(world, dist.ProcessGroup) else world
    options = getattr(backend, "options", None)
    timeout = getattr(options, "_timeout", default_pg_timeout)
    return float(timeout.total_seconds())
