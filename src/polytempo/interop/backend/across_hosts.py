"""`HostsGroup`: ranks of several hosts. Shared memory within each host, gloo between the hosts' first ranks.

host A   0 ─┐ shared          all-reduce   1  each host reduces to its first rank
         1 ─┤ memory                       2  the first ranks reduce among each other, through gloo
host B   2 ─┤                              3  each first rank gives the result to its host
         3 ─┘
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, PrefixStore, ReduceOp, Store, Work

from polytempo.interop.backend.process_group import SharedMemoryGroup
from polytempo.native.group import Group

_GLOO_OPS = {
    "sum": ReduceOp.SUM,
    "average": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
_BOOL_OPS = {"sum": "max", "bor": "max", "product": "min", "band": "min"}
"""The operation on the bytes 0 and 1 that stands for one on truth values."""
_WIRE_DTYPES = {torch.bool: torch.uint8, torch.int16: torch.int32}
"""The dtype on which gloo computes for a dtype that it does not know. Sums of the wider integers wrap to sums of the
narrower."""


_PIECE_BYTES, _MOST_UNDER_WAY = 4 << 20, 2
"""Larger tensors are reduced in pieces, with so many under way between hosts at a time."""

Finish = Callable[[], None]


class Hosts:
    """A group over several hosts, as `Group` is one over a host.

    All-reduce, broadcast and barrier cross the network once for each host: for K bytes and H hosts each host sends
    about 2 K (H - 1) / H, however many ranks it has. So does a gather on all ranks: of a host's K bytes K (H - 1) are
    sent, while its R ranks alone would send R times as many. The other collectives and messages are gloo's.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        local: Group,
        hosts: Sequence[str],
        timeout: timedelta,
        look: Look = None,
    ) -> None:
        self.rank, self.size, self.local, self._hosts = rank, size, local, list(hosts)
        self._firsts = [self._hosts.index(host) for host in dict.fromkeys(hosts)]
        self.gloo: Any = connected(PrefixStore("all", store), rank, size, timeout, look)
        self._leaders: Any = None
        if rank in self._firsts:
            place = PrefixStore("leaders", store)
            self._leaders = connected(place, self._firsts.index(rank), len(self._firsts), timeout, look)

    def issue(self, patience_s: float = 0.0) -> bool:
        """The state of the ranks of other hosts is not known here."""
        return False

    def leave(self) -> None:
        """Tell the ranks of this host that this one will not come again."""
        self.local.leave()

    def disconnect(self) -> None:
        """Close the connections to other hosts, as gloo does with its last reference. Nothing may be done here then."""
        self.gloo = self._leaders = None

    # ------------------------------------------------------------------ host by host

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, root: int = -1, timeout_s: float, form: int | None = None
    ) -> None:
        """`tensor` becomes `op` over all ranks' tensors, on every rank or only on `root`.

        Piece by piece: one is reduced within the host while another travels between hosts.
        """
        result = tensor if root in (-1, self.rank) else tensor.clone()
        under_way: deque[tuple[Tensor, Finish]] = deque()
        for piece in result.view(-1).split(_PIECE_BYTES // result.itemsize):
            self.local.all_reduce(piece, "sum" if op == "average" else op, root=0, timeout_s=timeout_s, form=form)
            under_way.append((piece, self._begin_between(piece, op, timeout_s)))
            if len(under_way) > _MOST_UNDER_WAY:
                self._finish(*under_way.popleft(), timeout_s)
        for each in under_way:
            self._finish(*each, timeout_s)

    def _begin_between(self, tensor: Tensor, op: str, timeout_s: float) -> Finish:
        """Begin to reduce among the hosts, if this is the rank that does so for its host; the answer waits for it."""
        if self._leaders is None or not tensor.numel():
            return _nothing
        options = AllreduceOptions()
        options.reduceOp = _GLOO_OPS[_BOOL_OPS.get(op, op) if tensor.dtype == torch.bool else op]
        options.timeout = timedelta(seconds=timeout_s)
        wire = tensor.to(_WIRE_DTYPES.get(tensor.dtype, tensor.dtype))
        work = self._leaders.allreduce([wire], options)

        def finish() -> None:
            work.wait()
            if wire is not tensor:
                tensor.copy_(wire)
            if op == "average":
                tensor.div_(self.size)

        return finish

    def _finish(self, tensor: Tensor, finish: Finish, timeout_s: float) -> None:
        """Wait until the hosts have reduced `tensor`, and give it to all ranks of this one."""
        self._between(finish)
        self._spread(tensor, 0, timeout_s)

    def reduce_scatter(
        self, inputs: Sequence[Tensor], output: Tensor, op: str = "sum", *, timeout_s: float, form: int | None = None
    ) -> None:
        """This rank's piece of an all-reduce: hosts exchange everything, as gloo would."""
        whole = torch.cat([piece.reshape(-1) for piece in inputs])
        self.all_reduce(whole, op, timeout_s=timeout_s, form=form)
        output.view(-1).copy_(whole.view(self.size, -1)[self.rank])

    def barrier(self, timeout_s: float) -> None:
        """Wait until all ranks are here."""
        self.all_reduce(torch.zeros(1, dtype=torch.uint8), timeout_s=timeout_s)

    def exchange(
        self,
        kind: str,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor | None],
        *,
        root: int = 0,
        timeout_s: float,
    ) -> None:
        """Move tensors, as `Group.exchange` does."""
        if kind == "broadcast":
            self._broadcast(next(tensor for tensor in (*sends, *receives) if tensor is not None), root, timeout_s)
        elif kind == "all_gather" or (kind == "all_to_all" and len(sends) == 1):
            into = [_bytes(tensor) for tensor in receives if tensor is not None]
            self._gather_on_all(_bytes(sends[0]), into, timeout_s)
        else:
            self._exchange_all(kind, [_bytes(tensor) for tensor in sends], receives, root)

    def _broadcast(self, tensor: Tensor, root: int, timeout_s: float) -> None:
        """Broadcast within the root's host, between the hosts, and within the others."""
        home = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[root]]
        if self.rank in home:
            self._spread(tensor, home.index(root), timeout_s)
        if tensor.numel():
            options = BroadcastOptions()
            options.rootRank = self._firsts.index(home[0])
            self._between(lambda: self._leaders.broadcast([_bytes(tensor)], options).wait())
        if self.rank not in home:
            self._spread(tensor, 0, timeout_s)

    def _gather_on_all(self, own: Tensor, receives: Sequence[Tensor], timeout_s: float) -> None:
        """Gather within each host, between the hosts, and the parts of other hosts within each again. Sizes may
        differ."""
        by_host = {host: [rank for rank, other in enumerate(self._hosts) if other == host] for host in self._hosts}
        here = by_host.pop(self._hosts[self.rank])
        self.local.exchange("all_to_all", [own], [receives[rank] for rank in here], timeout_s=timeout_s)
        if not any(tensor.numel() for tensor in receives):
            return
        others = [rank for ranks in by_host.values() for rank in ranks]
        arrived = torch.empty(sum(receives[rank].numel() for rank in others), dtype=torch.uint8)
        self._between(lambda: self._swap(torch.cat([receives[rank] for rank in here]), arrived, by_host, receives))
        if arrived.numel():
            self._spread(arrived, 0, timeout_s)
        for rank, part in zip(others, arrived.split([receives[rank].numel() for rank in others]), strict=True):
            receives[rank].copy_(part)

    def _swap(
        self, block: Tensor, arrived: Tensor, others: Mapping[str, Sequence[int]], receives: Sequence[Tensor]
    ) -> None:
        """This host's `block` goes to each other host, and theirs come, in the order of `others` and of leaders."""
        coming = {host: sum(receives[rank].numel() for rank in ranks) for host, ranks in others.items()}
        expected = [coming.get(host, 0) for host in dict.fromkeys(self._hosts)]
        given = [block.numel() * (host in coming) for host in dict.fromkeys(self._hosts)]
        self._leaders.alltoall_base(arrived, block.repeat(len(coming)), expected, given).wait()

    def _spread(self, tensor: Tensor, source: int, timeout_s: float) -> None:
        mine = self.local.rank == source
        receives = [None if mine or place != source else tensor for place in range(self.local.size)]
        self.local.exchange("broadcast", [tensor] if mine else [], receives, root=source, timeout_s=timeout_s)

    def _between(self, cross: Callable[[], object]) -> None:
        """`cross` the network, if this rank does so for its host; the others learn of a failure."""
        if self._leaders is None:
            return
        try:
            cross()
        except RuntimeError:
            self.leave()
            raise

    # ------------------------------------------------------------------ over all ranks, by gloo

    def _exchange_all(self, kind: str, sends: Sequence[Tensor], receives: Sequence[Tensor | None], root: int) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        wanted = [kind != "gather" or rank == root for rank in range(self.size)]
        one = sends[0] if len(sends) == 1 else None
        pieces = [(one if wanted[to] else empty) if one is not None else sends[to] for to in range(self.size) if sends]
        expected = [0 if tensor is None else tensor.nbytes for tensor in receives]
        arrived = torch.empty(sum(expected), dtype=torch.uint8)
        sizes = [piece.numel() for piece in pieces] or [0] * self.size
        self.gloo.alltoall_base(arrived, torch.cat(pieces) if pieces else empty, expected, sizes).wait()
        for tensor, part in zip(receives, arrived.split(expected), strict=True):
            if tensor is not None:
                _bytes(tensor).copy_(part)


class HostsGroup(SharedMemoryGroup):
    """torch.distributed's interface over `Hosts`. Messages go through gloo, and have its limits."""

    group: Hosts

    def abort(self) -> None:
        """Leave the group, and close the connections to other hosts, even if the group is still referred to."""
        self.shutdown()
        self.group.disconnect()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that are missing."""
        self.group.gloo.monitored_barrier(timeout or self.timeout, wait_all_ranks)

    def _begin_send(self, tensor: Tensor, to: int, tag: int) -> Work:
        return self.group.gloo.send([tensor], to, tag)

    def _begin_receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        return self.group.gloo.recv([tensor], source, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Receive from the rank that sends first."""
        return self.group.gloo.recv_anysource(list(tensors), tag)


def _nothing() -> None:
    return None


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


Look = Callable[[], object] | None
_LOOK_S = 0.02


def connected(store: Store, rank: int, size: int, timeout: timedelta, look: Look = None) -> Any:
    """The group, once all ranks have come. An error that `look` raises meanwhile ends the wait.

    gloo waits for connections without looking at anything else. So with a `look` it does that in a thread, which is
    left alone if the wait ends early: it ends after `timeout`.
    """
    if look is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    made: SimpleQueue[Any] = SimpleQueue()

    def make() -> None:
        try:
            made.put(dist.ProcessGroupGloo(store, rank, size, timeout))
        except Exception as error:
            made.put(error)

    threading.Thread(target=make, name="polytempo-connecting", daemon=True).start()
    while True:
        try:
            found = made.get(timeout=_LOOK_S)
        except Empty:
            look()
            continue
        if isinstance(found, Exception):
            raise found
        return found
