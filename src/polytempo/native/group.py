"""`Group`: ranks of one host that meet in shared memory. The Python face of `native/group.h`.

All members call the same collectives in the same order. What they call is compared in the call itself, before any
memory is written: a rank that does something else, or the same with other shapes, raises `Mismatch` on all of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from polytempo.core.errors import Mismatch, PeerLost, TimedOut
from polytempo.native.arena import Address, Arena, Block, Window, own_arena, window
from polytempo.native.library import load, why_not

BLOCK_BYTES = 256 << 10
RING_BYTES = 128 << 10

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
}
"""What can be reduced. Anything can be moved: as bytes, where it has no number here."""
_BYTES = 5

OPS = {"sum": 0, "average": 1, "min": 2, "max": 3, "product": 4, "band": 5, "bor": 6, "bxor": 7}
KINDS = (
    "barrier",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "step",
)
_ORDERS = {"linear": 0, "tree": 1}
_FINE, _LOST, _LATE, _MISMATCH, _BROKEN = range(5)


class Store(Protocol):
    """Where ranks leave messages for each other until they share memory: torch's stores are such."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


class Unreachable(RuntimeError):
    """Some ranks cannot map each other's memory. Every member of the group is told so, with the reason."""


class _Place(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rank", "size", "pid", "num_cores")),
        ("control", ctypes.c_void_p),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("arenas", "staging", "rings")),
        ("pidfds", ctypes.POINTER(ctypes.c_int32)),
        *((name, ctypes.c_int64) for name in ("arena_bytes", "block_bytes", "ring_bytes")),
    )


class Call(ctypes.Structure):
    """What a rank says that it is doing."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("number", "count", "extra")),
        *((name, ctypes.c_int32) for name in ("kind", "dtype", "op", "root")),
    )

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        details = [f"{self.count} elements of {_name_of(self.dtype)}"] if kind != "barrier" else []
        if kind in ("all_reduce", "reduce", "reduce_scatter"):
            details.insert(0, list(OPS)[self.op])
        if kind in ("broadcast", "reduce", "gather", "scatter"):
            details.append(f"root {self.root}")
        return f"call {self.number}: {kind}({', '.join(details)})"


def _name_of(code: int) -> str:
    return next((str(dtype).removeprefix("torch.") for dtype, number in DTYPES.items() if number == code), "bytes")


class _Member(NamedTuple):
    """What each rank tells the others in order to meet."""

    address: Address
    host: str
    staging: int
    rings: int
    control: int

    def as_json(self) -> str:
        return json.dumps([list(self.address), *self[1:]])

    @classmethod
    def from_json(cls, text: bytes) -> _Member:
        address, host, staging, rings, control = json.loads(text)
        return cls(Address(*map(int, address)), str(host), int(staging), int(rings), int(control))


def host_identity() -> str:
    """Processes with equal identities can map each other's memory: one running kernel, one tree of processes."""
    parts = [os.environ.get("POLYTEMPO_HOST", "")]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if "ns" in path else Path(path).read_text(encoding="ascii").strip())
        except OSError:
            parts.append("?")
    return "/".join(parts)


class Group:
    """A rank's part of a group. `names` are the ranks as errors call them (by default 0, 1, …).

    Memory per rank: four blocks to pass data through, and a ring for each neighbour's messages.
    `meet` waits until all members are there.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        names: Sequence[int] | None = None,
        block_bytes: int = BLOCK_BYTES,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        library = load()
        if library is None:
            raise Unreachable(f"no native core: {why_not()}")
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.names = list(names or range(size))
        self.lock = threading.Lock()
        """Held by whoever runs a collective."""
        self._library = library
        self.arena: Arena = own_arena()
        staging_bytes = 4 * block_bytes
        rings_bytes = library.pt_rings_bytes(size, ring_bytes)
        self._blocks = [self.arena.allocate(staging_bytes), self.arena.allocate(rings_bytes)]
        if rank == 0:
            self._blocks.append(self.arena.allocate(library.pt_control_bytes(size)))
        control = self._blocks[2].offset if rank == 0 else -1
        mine = _Member(self.arena.address, host_identity(), self._blocks[0].offset, self._blocks[1].offset, control)
        members = _introduced(store, rank, size, mine)
        self.windows = _mapped(store, rank, members)
        self.bases = [self.arena.base if w is None else w.base for w in self.windows]
        self._handle = self._opened(members, block_bytes, ring_bytes)
        self.closed = False
        self.failed = False
        self._end = weakref.finalize(self, _close, library, self._handle, self.arena, self._blocks, os.getpid())

    def _opened(self, members: Sequence[_Member], block_bytes: int, ring_bytes: int) -> int:
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

    def others_wait(self) -> bool:
        """Whether all others are in the next call already, so that this rank would not have to wait for them."""
        return bool(self._library.pt_group_others_wait(self._handle))

    # ------------------------------------------------------------------ collectives

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self.lock:
            self._check(self._library.pt_barrier(self._handle, limit_s), "barrier", limit_s)

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, root: int = -1, order: str = "linear", timeout_s: float | None = None
    ) -> None:
        """`tensor` becomes `op` over all ranks' tensors, on every rank or only on `root`.

        Added rank by rank, in the same order everywhere: all get the same bits, in every run. `order="tree"` adds by
        a balanced tree instead: where each rank has summed its own parts by such a tree, the bits depend on the parts
        alone, not on how many ranks they were dealt to (a power of two).
        Cost: with tensors in the arenas each rank reads K and writes K bytes; else see `native/collectives.cpp`.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self.lock:
            status = self._library.pt_all_reduce(
                self._handle,
                DTYPES[tensor.dtype],
                OPS[op],
                _ORDERS[order],
                root,
                tensor.data_ptr(),
                tensor.numel(),
                limit_s,
            )
            if status:
                self._check(status, "all_reduce", limit_s)

    def reduce_scatter(
        self,
        inputs: Sequence[Tensor],
        output: Tensor,
        op: str = "sum",
        *,
        order: str = "linear",
        timeout_s: float | None = None,
    ) -> None:
        """`output` becomes `op` over all ranks' `inputs[rank of this one]`."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self.lock:
            status = self._library.pt_reduce_scatter(
                self._handle,
                DTYPES[output.dtype],
                OPS[op],
                _ORDERS[order],
                (ctypes.c_void_p * self.size)(*(piece.data_ptr() for piece in inputs)),
                output.data_ptr(),
                output.numel(),
                limit_s,
            )
            if status:
                self._check(status, "reduce_scatter", limit_s)

    def exchange(
        self,
        kind: str,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor | None],
        *,
        root: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Move tensors: `sends` is one for everybody, one for each rank, or none; `receives[p]` takes what p sends."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        example = next((t for t in (*sends, *receives) if t is not None), None)
        dtype = _BYTES if example is None else DTYPES.get(example.dtype, _BYTES)
        even = kind in ("broadcast", "all_gather", "gather", "scatter")
        count = example.numel() if even and example is not None else 0
        num_sends = max(1, len(sends))
        with self.lock:
            status = self._library.pt_exchange(
                self._handle,
                KINDS.index(kind),
                dtype,
                root,
                count,
                len(sends),
                (ctypes.c_void_p * num_sends)(*(t.data_ptr() for t in sends)),
                (ctypes.c_int64 * num_sends)(*(t.nbytes for t in sends)),
                (ctypes.c_void_p * self.size)(*(None if t is None else t.data_ptr() for t in receives)),
                (ctypes.c_int64 * self.size)(*(0 if t is None else t.nbytes for t in receives)),
                limit_s,
            )
            if status:
                self._check(status, kind, limit_s)

    # ------------------------------------------------------------------ point to point

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Transfer:
        """Begin to send. The tensor stays unchanged until the transfer is done."""
        dtype = DTYPES.get(tensor.dtype, _BYTES)
        pointer = self._library.pt_send(self._handle, to, tag, dtype, tensor.data_ptr(), tensor.nbytes)
        return Transfer(self, pointer, tensor, f"send(to={self.names[to]}, tag={tag})")

    def receive(self, tensor: Tensor, source: int = -1, tag: int = 0) -> Transfer:
        """Begin to receive from `source`, or from anyone (-1)."""
        dtype = DTYPES.get(tensor.dtype, _BYTES)
        pointer = self._library.pt_receive(self._handle, source, tag, dtype, tensor.data_ptr(), tensor.nbytes)
        whom = "anyone" if source < 0 else self.names[source]
        return Transfer(self, pointer, tensor, f"recv(source={whom}, tag={tag})")

    def advance_transfers(self, timeout_s: float) -> int:
        """Move messages until none is pending or the time is over; says how many are pending."""
        return int(self._library.pt_transfers_advance(self._handle, timeout_s))

    # ------------------------------------------------------------------ the end

    def leave(self) -> None:
        """Tell the others that this rank will not come again: their waits for it raise `PeerLost`."""
        if not self.closed:
            self.closed = True
            self._library.pt_group_leave(self._handle)

    def _check(self, status: int, what: str, timeout_s: float) -> None:
        if status == _FINE:
            return
        me, culprit = self.names[self.rank], self._library.pt_group_culprit(self._handle)
        if status == _LOST:
            self.failed = True
            raise PeerLost(me, None, what, self.names[culprit], "its process has ended, or it has left the group")
        self.failed = True
        if status == _LATE:
            missing = [str(self.names[r]) for r in range(self.size) if self._library.pt_group_missing(self._handle, r)]
            self.leave()
            raise TimedOut(me, None, what, timeout_s, f"rank {', '.join(missing)} did not come")
        if status == _MISMATCH:
            mine, theirs = self.call_of(self.rank), self.call_of(culprit)
            self.leave()
            raise Mismatch(
                f"ranks do different things at once: rank {me} is in {mine}, rank {self.names[culprit]} in {theirs}"
                f"{'' if str(mine) != str(theirs) else ', with other sizes for one another'}; all ranks of a group "
                "must make the same calls in the same order, with equal shapes and dtypes"
            )
        raise PeerLost(me, None, what, self.names[culprit], "the group broke in an earlier call")

    def call_of(self, rank: int) -> Call:
        """What `rank` says that it is doing."""
        call = Call()
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
        """Whether it is finished, well or not."""
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
        if status == _FINE:
            return
        me, peer = group.names[group.rank], group.names[self.peer] if self.peer >= 0 else None
        if status == _LATE:
            raise TimedOut(me, None, self.what, limit_s)
        if status == _MISMATCH:
            came = f"{library.pt_transfer_arrived_bytes(self.pointer)} bytes of "
            came += _name_of(library.pt_transfer_arrived_dtype(self.pointer))
            wanted = f"{self.tensor.nbytes} bytes of {_name_of(DTYPES.get(self.tensor.dtype, _BYTES))}"
            raise Mismatch(f"rank {me}: {self.what} expects {wanted}, and rank {peer} sent {came}")
        raise PeerLost(me, None, self.what, peer, "its process has ended, or it has left the group")


def _forget(group: Group, pointer: int) -> None:
    group._library.pt_transfer_free(group._handle, pointer)


def _introduced(store: Store, rank: int, size: int, mine: _Member) -> list[_Member]:
    store.set(f"member/{rank}", mine.as_json())
    return [mine if r == rank else _Member.from_json(store.get(f"member/{r}")) for r in range(size)]


def _mapped(store: Store, rank: int, members: Sequence[_Member]) -> list[Window | None]:
    """Windows onto all arenas but our own. All ranks learn whether all could map all."""
    windows: list[Window | None] = []
    reason = ""
    try:
        hosts = {member.host for member in members}
        if len(hosts) > 1:
            raise OSError(0, "they are on different hosts or in different containers")
        windows = [None if r == rank else window(member.address) for r, member in enumerate(members)]
    except OSError as error:
        reason = f"rank {rank}: {error.strerror}"
    store.set(f"mapped/{rank}", reason or "yes")
    answers = [store.get(f"mapped/{r}").decode() for r in range(len(members))]
    refused = [answer for answer in answers if answer != "yes"]
    if refused:
        raise Unreachable(f"these ranks cannot share memory: {'; '.join(sorted(set(refused)))}")
    return windows


_leaving: list[tuple[Any, int, Arena, list[Block]]] = []
"""Groups of which this process is no longer a member, while others still may read its memory."""


def _close(library: Any, handle: int, arena: Arena, blocks: list[Block], owner: int) -> None:
    """Leave; give the memory back as soon as all others have left too."""
    if os.getpid() != owner:
        return
    library.pt_group_leave(handle)
    _leaving.append((library, handle, arena, blocks))
    for entry in list(_leaving):
        left_library, left, left_arena, left_blocks = entry
        if left_library.pt_group_empty(left):
            _leaving.remove(entry)
            left_library.pt_group_close(left)
            for block in left_blocks:
                left_arena.free(block)
