"""`Transport`: operations of one real rank, begun on torch.distributed.

One number tells messages of a pair of ranks apart, their tag:

bit 30    29 … 25    24 … 10               9 … 0
0         path of channels (20 bits)       tag        of a whole group
1         group      path (20 bits)        tag (5)    of a group along axes of a mesh

NCCL performs messages between devices in batches, and so do the backends of other kinds. A rank's batches follow each
other on one stream, and a batch is over when all of its messages have met their other ends. Ranks that each receive in
one batch and send in the next would wait for each other for ever. So a message is held until it is awaited; then its
batch is, of its channel,

    awaited receive   all held sends, and as many held receives: the awaited one, then the oldest
                      without held sends the awaited one alone: the others may answer a later message of this rank
    awaited send      all held sends

All messages are batches, a single one, too: NCCL gives a batch another communicator than a message without one. Only
the stream waits for a batch, so a launched coroutine goes on to its end, and the next one's batches follow its own.
That every exchange of the library but a pipeline's ends this way is a law (`laws/test_batched_messages.py` under
`tests/`). If ranks receive from more others than they send to, an exchange may not end.

A pipeline's messages (`LentSend`) go through the host. A stage sends a gradient as its last message of a step and
awaits none after it, so its batch would begin with the next step, while the receiver may have to end this one first,
as where all stages meet to save. And messages of stages cross: two batches of sends alone, in both directions, would
wait for each other for ever. On the host a message waits for no other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.constants import default_pg_timeout

from polytempo.core import PeerLost, PolytempoError, TimedOut
from polytempo.core.mesh import MOST_GROUPS
from polytempo.core.op import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    LentRecv,
    LentSend,
    Op,
    Recv,
    ReduceScatter,
    Send,
)
from polytempo.core.port import CHANNELS_OF_A_GROUP
from polytempo.device import HOST, HostCopy, on_accelerator, pinned_like
from polytempo.native.group import Group
from polytempo.native.lending import borrowed, empty_note, lendable, lent

_LOST = re.compile(r"closed by peer|connection reset|broken pipe|socket closed|connection refused|remote process", re.I)
_LATE = re.compile(r"timed? ?out", re.I)


class Begun(NamedTuple):
    """An operation under way: torch's work (None: it is over), and its answer once the work is done."""

    work: Any
    answer: Callable[[], Any]


class Substitute(NamedTuple):
    """A group of all ranks that takes the default one's place, and the backend that groups of some ranks have."""

    group: Any
    backend: str


class Transport:
    """Rank `rank` of `size` in `group`: a process group, a backend, or None for the default one."""

    def __init__(self, rank: int, size: int, group: Any = None) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.substitute: Substitute | None = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self.making: Callable[[], AbstractContextManager[Any]] = nullcontext
        """The context of making a group of some ranks; it gives the options of the group's backend."""
        self.unbatched = frozenset({HOST.type})
        """Kinds of devices with messages that travel alone, not in batches (see `MessageBatches`)."""
        self._batches: MessageBatches | None = None

    def share_groups(self, other: Transport) -> None:
        """Use the groups that `other` has made, and share the groups that are made here with it."""
        self._groups, self.substitute, self.making = other._groups, other.substitute, other.making

    def forget(self) -> None:
        """Let go of all groups, so that they can end."""
        self._groups, self.group, self._batches, self.substitute = {}, None, None, None

    @property
    def timeout_s(self) -> float:
        """The deadline of operations that have none of their own."""
        return group_timeout_s(self.whole)

    # ------------------------------------------------------------------ messages

    def send(self, op: Send) -> Begun:
        """Hand a buffer over; done when it may change."""
        tag = wire_tag(op.channel, op.tag)
        if isinstance(op, LentSend) and (group := self._sharing(op.buffer)) is not None:
            return Begun(self.whole.send([lent(group, op.buffer, op.to)], op.to, tag), _none)
        if isinstance(op, LentSend) and on_accelerator(op.buffer) and op.buffer.numel():
            return Begun(self._sent_through_host(op, tag), _none)
        work = self._message(op, op.buffer, lambda: self.whole.send([op.buffer.contiguous()], op.to, tag))
        return Begun(work, _none)

    def recv(self, op: Recv) -> Begun:
        """Receive into new memory, or where the sender has lent it."""
        tag = wire_tag(op.channel, op.tag)
        if isinstance(op, LentRecv) and (group := self._sharing(op.like)) is not None:
            note = empty_note()
            answer = cache(partial(borrowed, group, note, op.like, op.source))
            return Begun(self.whole.recv([note], op.source, tag), answer)
        into = torch.empty_like(op.like, memory_format=torch.contiguous_format)
        if isinstance(op, LentRecv) and on_accelerator(into) and into.numel():
            here = pinned_like(into)
            return Begun(self.whole.recv([here], op.source, tag), cache(lambda: into.copy_(here, non_blocking=True)))
        return Begun(self._message(op, into, lambda: self.whole.recv([into], op.source, tag)), lambda: into)

    def _sharing(self, tensor: Tensor) -> Group | None:
        """The ranks, where a tensor like this is lent from one to another through memory that they share."""
        group = getattr(self.whole, "group", None)
        return group if isinstance(group, Group) and lendable(tensor) else None

    def _sent_through_host(self, op: LentSend, tag: int) -> Any:
        """A message that leaves without being awaited, as one in a device's batch does not."""
        if (begin := getattr(self.whole, "send_through_host", None)) is not None:
            return begin(op.buffer, op.to, tag)
        return self.whole.send(HostCopy([op.buffer]).wait(), op.to, tag)

    def _message(self, op: Send | Recv, tensor: Tensor, begin: Callable[[], Any]) -> Any:
        if not tensor.numel():
            return None
        if tensor.device.type in self.unbatched:
            return begin()
        if self._batches is None:
            if (backend := _batching(self.whole, tensor.device)) is None:
                self.unbatched |= {tensor.device.type}
                return begin()
            self._batches = MessageBatches(backend)
        return self._batches.hold(op.channel, isinstance(op, Send), begin)

    # ------------------------------------------------------------------ collectives

    def collective(self, op: Collective[Any]) -> Begun:
        """Begin this rank's part. All members begin their collectives in the same order."""
        if len(op.members) == 1:
            return Begun(None, lambda: _alone(op))
        group, ranks = self._group(op.members), sorted(op.members)
        match op:
            case AllReduce(buffer):
                return Begun(group.allreduce([buffer], _options(AllreduceOptions, op)), lambda: buffer)
            case Broadcast(buffer, source):
                options = _options(BroadcastOptions, op)
                options.rootRank = ranks.index(source)
                return Begun(group.broadcast([buffer], options), lambda: buffer)
            case Barrier():
                options = _options(BarrierOptions, op)
                options.device = HOST
                return Begun(group.barrier(options), _none)
            case AllGather():
                return self._all_gather(group, ranks, op)
            case ReduceScatter():
                return self._reduce_scatter(group, ranks, op)
            case AllToAll():
                return self._all_to_all(group, ranks, op)
        raise TypeError(f"rank {self.rank} awaited {op!r}, which is not a collective of a world")

    def _all_gather(self, group: Any, ranks: list[int], op: AllGather) -> Begun:
        gathered = [torch.empty_like(op.buffer) for _ in ranks]
        work = group.allgather([gathered], [op.buffer.contiguous()], _options(AllgatherOptions, op))
        order = [ranks.index(member) for member in op.members]
        return Begun(work, lambda: [gathered[i] for i in order])

    def _reduce_scatter(self, group: Any, ranks: list[int], op: ReduceScatter) -> Begun:
        pieces = op.buffer.chunk(len(ranks))
        ordered = [pieces[op.members.index(member)] for member in ranks]
        mine = torch.empty_like(ordered[ranks.index(self.rank)])
        work = group.reduce_scatter([mine], [ordered], _options(ReduceScatterOptions, op))
        return Begun(work, lambda: mine)

    def _all_to_all(self, group: Any, ranks: list[int], op: AllToAll) -> Begun:
        ordered = [op.pieces[op.members.index(member)] for member in ranks]
        sizes = [op.likes[op.members.index(member)].numel() for member in ranks]
        arrived = op.pieces[0].new_empty(sum(sizes))
        given = (arrived, torch.cat(ordered), sizes, [piece.numel() for piece in ordered])
        work = group.alltoall_base(*given, _options(AllToAllOptions, op))
        order = [ranks.index(member) for member in op.members]
        return Begun(work, lambda: [arrived.split(sizes)[i] for i in order])

    # ------------------------------------------------------------------ groups and errors

    @property
    def whole(self) -> Any:
        """The group of all ranks."""
        return self.group or (dist.group.WORLD if self.substitute is None else self.substitute.group)

    def _group(self, members: tuple[int, ...]) -> Any:
        if len(members) == self.size:
            return self.whole
        if self.group is not None:
            raise ValueError(f"collectives of some ranks {members} need the default process group; use another route")
        if members not in self._groups:
            timeout = timedelta(seconds=group_timeout_s())
            backend = None if self.substitute is None else self.substitute.backend
            with self.making() as options:
                self._groups[members] = _new_group(sorted(members), timeout, backend, options)
        return self._groups[members]

    def translated(self, op: Op[Any], step: int, peer: int, error: RuntimeError) -> Exception:
        """An error of torch's in the words that both worlds use. `peer`: the other rank of a message, or -1."""
        match error:
            case PeerLost(peer=lost, reason=reason):
                return PeerLost(self.rank, step, str(op), lost, reason)
            case TimedOut(timeout_s=timeout_s, reason=reason):
                return TimedOut(self.rank, step, str(op), timeout_s, reason)
            case PolytempoError():
                return error
        text = str(error)
        if _LATE.search(text):
            return TimedOut(self.rank, step, str(op), op.timeout_s or self.timeout_s)
        if _LOST.search(text):
            return PeerLost(self.rank, step, str(op), peer if peer >= 0 else None, text.splitlines()[0][:200])
        return error


def _none() -> None:
    return None


def _new_group(members: list[int], timeout: timedelta, backend: str | None, options: Any) -> Any:
    """A process group that `members` alone create.

    torch names such a group by its ranks and by the number of all groups that a process has. Where members have
    different numbers, as where one island has two workers and the next one has one, they would wait for each other
    without end. This name counts groups of these ranks alone.
    """
    prefix = f"polytempo-{'-'.join(map(str, members))}-"
    name = f"{prefix}{sum(other.startswith(prefix) for other in _c10d._world.pg_names.values())}"
    torchs = _c10d._hash_ranks_to_str
    _c10d._hash_ranks_to_str = lambda ranks: name
    try:
        return dist.new_group(members, timeout, backend, options, use_local_synchronization=True)
    finally:
        _c10d._hash_ranks_to_str = torchs


def _batching(group: Any, device: torch.device) -> Any:
    """The object that batches messages between devices: torch's backend of `group`, also behind our own. None where
    each travels alone: through the host, or by a backend without batches."""
    if hasattr(group, "on_devices"):
        return group.on_devices
    backend = group._get_backend(device) if isinstance(group, dist.ProcessGroup) else group
    return backend if getattr(backend, "supports_coalescing", True) else None


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
    raise TypeError(f"{op!r} is not a collective of a world")


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


_TAGS_OF_A_WHOLE = 1024
_TAGS_IN_A_MESH = 32


def wire_tag(channel: int, tag: int) -> int:
    """A message's number, from 0 to 2³¹ - 1; others for other groups, channels and tags.

    Raises ValueError for a tag, or a mesh in a mesh, that has no place in it.
    """
    group, path = divmod(channel, CHANNELS_OF_A_GROUP)
    num_tags = _TAGS_IN_A_MESH if group else _TAGS_OF_A_WHOLE
    if not 0 <= tag < num_tags:
        where = "in a group of a mesh " if group else ""
        raise ValueError(f"tags {where}run from 0 to {num_tags - 1}, got {tag}")
    if group >= MOST_GROUPS:
        raise ValueError("a group of a mesh within a group of a mesh sends no messages; make one mesh")
    place = MOST_GROUPS + group if group else 0
    return (place * CHANNELS_OF_A_GROUP + path) * num_tags + tag


class Held:
    """A message that waits for its batch, or is under way: the part of torch's Work for `PendingOp`."""

    __slots__ = ("_batches", "begin", "channel", "is_send", "work")

    def __init__(self, batches: MessageBatches, channel: int, is_send: bool, begin: Callable[[], Any]) -> None:
        self._batches, self.channel, self.is_send, self.begin = batches, channel, is_send, begin
        self.work: Any = None

    def start(self) -> None:
        """Begin its batch, if it is held."""
        if self.work is None:
            self._batches.start(self)

    def wait(self, *limit: Any) -> None:
        """Wait until its batch is over. On a device the stream waits, not the caller."""
        self.start()
        self.work.wait(*limit)


class MessageBatches:
    """The held messages of one rank. `backend`: torch's, which begins and ends batches."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._held: dict[int, list[Held]] = defaultdict(list)

    def hold(self, channel: int, is_send: bool, begin: Callable[[], Any]) -> Held:
        """Keep a message until it, or one with it, is awaited. `begin` hands it to torch."""
        held = Held(self, channel, is_send, begin)
        self._held[channel].append(held)
        return held

    def start(self, awaited: Held) -> None:
        """Begin a batch with `awaited` in it."""
        held = self._held.pop(awaited.channel)
        sends = [each for each in held if each.is_send]
        receives = sorted((each for each in held if not each.is_send), key=lambda each: each is not awaited)
        batch = sends if awaited.is_send else sends + receives[: max(len(sends), 1)]
        if len(batch) < len(held):
            self._held[awaited.channel] = [each for each in held if each not in batch]
        self._backend._start_coalescing()
        for each in batch:
            each.begin()
        work = self._backend._end_coalescing()
        for each in batch:
            each.work = work
