"""`Group`: ranks of one host that meet in shared memory. The Python interface of `native/group.h`.

All members call the same collectives in the same order. Calls are compared in the call itself, before any
memory is written: a rank that does something else, or the same with other shapes, raises `Mismatch` on all of them
(not two tensors of one shape and dtype in another order: they have no names here).
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from polytempo.core.errors import Mismatch, PeerLost, PolytempoError, TimedOut
from polytempo.device import is_host
from polytempo.native import departure
from polytempo.native.arena import Arena, own_arena
from polytempo.native.call import (
    DTYPES,
    FINE,
    KINDS,
    LATE,
    LOST,
    LOST_WHY,
    MISMATCH,
    MOVED,
    NOTHING,
    OPS,
    NativeCall,
    failure,
    form_of,
    name_of,
    repeated,
)
from polytempo.native.library import load, why_not
from polytempo.native.meeting import (
    Member,
    Store,
    Unreachable,
    exchange_members,
    host_identity,
    map_arenas,
    report_absence,
)

BLOCK_BYTES = 512 << 10
RING_BYTES, LEAST_RING_BYTES, RINGS_BYTES = 8 << 20, 512 << 10, 64 << 20
"""The most and the least of one ring, and the most of a rank's rings together, as far as the least allows."""

_ORDERS = {"linear": 0, "tree": 1}
_MAX_RANKS, _LEAST_BYTES = 1024, 64


class _Place(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rank", "size", "pid", "num_cores")),
        ("control", ctypes.c_void_p),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("arenas", "staging", "rings")),
        ("pidfds", ctypes.POINTER(ctypes.c_int32)),
        *((name, ctypes.c_int64) for name in ("arena_bytes", "block_bytes", "ring_bytes")),
    )


class Quick(NamedTuple):
    """`all_reduce(dtype, op, pointer, count, form, timeout_s)`, `barrier(timeout_s)`: answer a status to `check`."""

    all_reduce: Callable[[int, int, int, int, int, float], int]
    barrier: Callable[[float], int]


class Group:
    """A rank's part of a group. `names` are the ranks as errors call them (by default 0, 1, …).

    Sums are added rank by rank, in the same order everywhere: all get the same bits, in every run. `order="tree"` adds
    by a balanced tree instead: where each rank has summed its own parts by such a tree, the bits depend on the parts
    alone, not on how many ranks they were dealt to (a power of two).

    Memory per rank: four blocks to pass data through, and a ring for each neighbour's messages; only pages that
    messages have filled take memory. A message that fits in its ring is sent immediately.
    To make one waits until all members are there; where one of them cannot come, all raise `Unreachable`.

    After `TimedOut` do not use the arena's tensors of that call for anything else: slower ranks may still be in the
    call, and read them, or write to them where it is a reduction. Release them; other tensors stay as they are.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        names: Sequence[int] | None = None,
        order: str = "linear",
        block_bytes: int = BLOCK_BYTES,
        ring_bytes: int | None = None,
    ) -> None:
        if order not in _ORDERS or not 1 <= size <= _MAX_RANKS or block_bytes < _LEAST_BYTES * size:
            raise ValueError(
                f"a group has 1 to {_MAX_RANKS} ranks, adds in order {' or '.join(_ORDERS)}, and has blocks of at "
                f"least {_LEAST_BYTES} bytes a rank; got {size} ranks, order {order!r} and {block_bytes} bytes"
            )
        if ring_bytes is None:
            ring_bytes = max(LEAST_RING_BYTES, min(RING_BYTES, RINGS_BYTES // size))
        self.rank, self.size, self.timeout_s, self.order = rank, size, timeout_s, order
        self.names = list(names or range(size))
        self.lock = threading.Lock()
        """Held while a collective runs."""
        library, members = self._meet(store, block_bytes, ring_bytes)
        self.bases = [self.arena.base if w is None else w.base for w in self.windows]
        self._handle = self._opened(members, block_bytes, ring_bytes)
        self.closed = False
        self.failed = False
        self._broke: PolytempoError | None = None  # the error that broke the group: later calls raise it again
        self.owner = os.getpid()
        remains = departure.Remains(library, self._handle, self.arena, self._blocks, self.windows)
        self._end = weakref.finalize(self, departure.close, remains, self.owner)
        self._end.atexit = False  # threads may still be in the core; it ends with the process
        departure.add(self)

    def _meet(self, store: Store, block_bytes: int, ring_bytes: int) -> tuple[Any, list[Member]]:
        """Allocate this rank's blocks and map the arenas of all others. The native core, and the members."""
        library = load()
        if library is None:
            raise report_absence(store, self.rank, f"rank {self.names[self.rank]} has no native core: {why_not()}")
        self._library: Any = library
        departure.sweep()
        rings_bytes = library.pt_rings_bytes(self.size, ring_bytes)
        control_bytes = [library.pt_control_bytes(self.size)] if self.rank == 0 else []
        try:
            self.arena: Arena = own_arena()
            blocks = departure.allocate_all(self.arena, [4 * block_bytes, rings_bytes, *control_bytes])
        except (OSError, MemoryError) as error:
            raise report_absence(store, self.rank, f"rank {self.names[self.rank]}: {error}") from error
        staging, rings, control = (*(block.offset for block in blocks), -1)[:3]
        mine = Member(self.arena.address, host_identity(), staging, rings, control)
        try:
            members = exchange_members(store, self.rank, self.size, mine)
            self.windows = map_arenas(store, self.rank, members)
        except Unreachable:  # on all ranks; after any other error some may have got through, and use the blocks
            departure.free_all(self.arena, blocks)
            raise
        # The control block is never freed: others read it until they have closed. It is small.
        self._blocks = blocks[:2]
        return library, members

    def _opened(self, members: Sequence[Member], block_bytes: int, ring_bytes: int) -> int:
        pointers, numbers = ctypes.c_void_p * self.size, ctypes.c_int32 * self.size
        place = _Place(
            rank=self.rank,
            size=self.size,
            pid=os.getpid(),
            num_cores=len(os.sched_getaffinity(0)),
            control=self.bases[0] + members[0].control,
            arenas=pointers(*self.bases),
            staging=pointers(*(base + m.staging for base, m in zip(self.bases, members, strict=True))),
            rings=pointers(*(base + m.rings for base, m in zip(self.bases, members, strict=True))),
            pidfds=numbers(*(-1 if w is None else w.pidfd for w in self.windows)),
            arena_bytes=self.arena.num_bytes,
            block_bytes=block_bytes,
            ring_bytes=ring_bytes,
        )
        return int(self._library.pt_group_open(ctypes.byref(place)))

    def issue(self, patience_s: float = 0.0) -> bool:
        """Announce that this rank's program has come to the next call, in whichever thread that is made.

        True where all others' programs have come to it, too, or come within `patience_s`: then the call does not have
        to wait for them.
        """
        return bool(self._library.pt_group_issue(self._handle, patience_s))

    def quick(self) -> Quick:
        """The core's functions themselves, for callers that keep the order of calls and build the arguments."""
        order, everyone, handle = _ORDERS[self.order], -1, self._handle
        return Quick(  # `_library` is looked up in each call: in a forked child it is another
            lambda dtype, op, data, count, form, limit_s: self._library.pt_all_reduce(
                handle, dtype, op, order, everyone, data, count, form, limit_s
            ),
            lambda limit_s: self._library.pt_barrier(handle, limit_s),
        )

    # ------------------------------------------------------------------ collectives

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self.lock:
            self.check(self._library.pt_barrier(self._handle, limit_s), "barrier", limit_s)

    def all_reduce(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        root: int = -1,
        order: str | None = None,
        timeout_s: float | None = None,
        form: int | None = None,
    ) -> None:
        """`tensor` becomes `op` over all ranks' tensors, on every rank or only on `root`.

        `form` has to agree between ranks, here and in the other collectives: by default it is the tensor's shape.
        Cost: with tensors in the arenas each rank reads K and writes K bytes; else see `native/collectives.cpp`.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        check_on_host(tensor)
        with self.lock:
            status = self._library.pt_all_reduce(
                self._handle,
                DTYPES[tensor.dtype],
                OPS[op],
                _ORDERS[order or self.order],
                root,
                tensor.data_ptr(),
                tensor.numel(),
                form_of(tensor.shape) if form is None else form,
                limit_s,
            )
            self.check(status, "all_reduce", limit_s)

    def reduce_scatter(
        self,
        inputs: Sequence[Tensor],
        output: Tensor,
        op: str = "sum",
        *,
        order: str | None = None,
        timeout_s: float | None = None,
        form: int | None = None,
    ) -> None:
        """`output` becomes `op` over all ranks' `inputs[rank of this one]`."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        check_on_host(output, *inputs)
        with self.lock:
            status = self._library.pt_reduce_scatter(
                self._handle,
                DTYPES[output.dtype],
                OPS[op],
                _ORDERS[order or self.order],
                (ctypes.c_void_p * self.size)(*(piece.data_ptr() for piece in inputs)),
                output.data_ptr(),
                output.numel(),
                form_of(output.shape) if form is None else form,
                limit_s,
            )
            self.check(status, "reduce_scatter", limit_s)

    def exchange(
        self,
        kind: str,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor | None],
        *,
        root: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Move tensors: `sends` has one for all ranks, one for each, or none; `receives[p]` takes p's tensor."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        example = next((t for t in (*sends, *receives) if t is not None), None)
        dtype = NOTHING if example is None else MOVED[example.dtype]
        even = kind in ("broadcast", "all_gather", "gather", "scatter")
        compared = example if even else None
        count, form = (0, 0) if compared is None else (compared.numel(), form_of(compared.shape))
        num_sends = max(1, len(sends))
        check_on_host(*sends, *receives)
        with self.lock:
            status = self._library.pt_exchange(
                self._handle,
                KINDS.index(kind),
                dtype,
                root,
                count,
                form,
                len(sends),
                (ctypes.c_void_p * num_sends)(*(t.data_ptr() for t in sends)),
                (ctypes.c_int64 * num_sends)(*(t.nbytes for t in sends)),
                (ctypes.c_void_p * self.size)(*(None if t is None else t.data_ptr() for t in receives)),
                (ctypes.c_int64 * self.size)(*(0 if t is None else t.nbytes for t in receives)),
                limit_s,
            )
            self.check(status, kind, limit_s)

    # ------------------------------------------------------------------ point to point

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Transfer:
        """Begin to send. The tensor stays unchanged until the transfer is done."""
        if to == self.rank:
            raise ValueError(f"rank {self.names[to]} cannot send to itself; copy the tensor instead")
        check_on_host(tensor)
        dtype = MOVED[tensor.dtype]
        pointer = self._library.pt_send(self._handle, to, tag, dtype, tensor.data_ptr(), tensor.nbytes)
        return Transfer(self, pointer, tensor, f"send(to={self.names[to]}, tag={tag})")

    def receive(self, tensor: Tensor, source: int = -1, tag: int = 0) -> Transfer:
        """Begin to receive from `source`, or from anyone (-1)."""
        if source == self.rank:
            raise ValueError(f"rank {self.names[source]} cannot receive from itself; copy the tensor instead")
        check_on_host(tensor)
        dtype = MOVED[tensor.dtype]
        pointer = self._library.pt_receive(self._handle, source, tag, dtype, tensor.data_ptr(), tensor.nbytes)
        whom = "anyone" if source < 0 else self.names[source]
        return Transfer(self, pointer, tensor, f"recv(source={whom}, tag={tag})")

    def serve_transfers(self, timeout_s: float) -> None:
        """Sleep in a thread until another rank's message waits for this one, or the time is over; then see to it."""
        self._library.pt_transfers_serve(self._handle, timeout_s)

    def wake_server(self) -> None:
        """End the sleep of `serve_transfers`."""
        if os.getpid() == self.owner:  # a forked child has no such thread
            self._library.pt_transfers_wake(self._handle)

    # ------------------------------------------------------------------ the end

    def leave(self) -> None:
        """Leave the group: from now on the others' waits for this rank raise `PeerLost`."""
        if not self.closed and os.getpid() == self.owner:  # a forked child is not a member
            self.closed = True
            self._library.pt_group_leave(self._handle)

    def check(self, status: int, what: str, timeout_s: float) -> None:
        """Raise the error of a status of the native core, for the operation `what`."""
        if status == FINE:
            return
        self.failed = True
        if self._broke is not None:
            raise repeated(self, self._broke, what)
        self._broke = failure(self, status, what, timeout_s)
        if status != LOST:
            self.leave()
        raise self._broke

    @property
    def culprit(self) -> int:
        """The rank that broke the group."""
        return int(self._library.pt_group_culprit(self._handle))

    def missing(self) -> list[int]:
        """The ranks that have not come as far as this one."""
        return [rank for rank in range(self.size) if self._library.pt_group_missing(self._handle, rank)]

    def expecting(self, sent: ctypes.c_int64, expected: ctypes.c_int64) -> int:
        """The rank that expects other bytes than the culprit sends, and how many; -1: they disagree in other things."""
        return int(self._library.pt_group_expecting(self._handle, ctypes.byref(sent), ctypes.byref(expected)))

    def call_of(self, rank: int) -> NativeCall:
        """The call that `rank` has announced."""
        call = NativeCall()
        self._library.pt_group_call(self._handle, rank, ctypes.byref(call))
        return call


class Transfer:
    """A message under way. It holds its tensor until it is done."""

    __slots__ = ("__weakref__", "_end", "group", "pointer", "tensor", "what")

    def __init__(self, group: Group, pointer: int, tensor: Tensor, what: str) -> None:
        self.group, self.pointer, self.tensor, self.what = group, pointer, tensor, what
        self._end = weakref.finalize(self, _forget, group, pointer)
        self._end.atexit = False

    def done(self) -> bool:
        """True if it is finished, with or without an error."""
        return bool(self.group._library.pt_transfer_done(self.group._handle, self.pointer))

    @property
    def peer(self) -> int:
        """The other rank; -1 while nothing has come from anyone."""
        return int(self.group._library.pt_transfer_peer(self.pointer))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is finished. Errors: PeerLost, TimedOut, and Mismatch where sender and receiver disagree."""
        group, library = self.group, self.group._library
        limit_s = group.timeout_s if timeout_s is None else timeout_s
        status = library.pt_transfer_wait(group._handle, self.pointer, limit_s)
        if status == FINE:
            return
        me, peer = group.names[group.rank], group.names[self.peer] if self.peer >= 0 else None
        if status == LATE:
            raise TimedOut(me, None, self.what, limit_s)
        if status == MISMATCH:
            came = f"{library.pt_transfer_arrived_bytes(self.pointer)} bytes of "
            came += name_of(library.pt_transfer_arrived_dtype(self.pointer))
            wanted = f"{self.tensor.nbytes} bytes of {name_of(MOVED[self.tensor.dtype])}"
            raise Mismatch(f"rank {me}: {self.what} expects {wanted}, and rank {peer} sent {came}")
        raise PeerLost(me, None, self.what, peer, LOST_WHY)


def check_on_host(*tensors: Tensor | None) -> None:
    """ValueError for a tensor in a device's memory, which the native core cannot read."""
    for tensor in tensors:
        if tensor is not None and not is_host(tensor):
            raise ValueError(f"a native group takes tensors of the host, got one on {tensor.device}; give its .cpu()")


def _forget(group: Group, pointer: int) -> None:
    if os.getpid() == group.owner:  # in a forked child the lock may be held by a thread that it has not got
        group._library.pt_transfer_free(group._handle, pointer)
