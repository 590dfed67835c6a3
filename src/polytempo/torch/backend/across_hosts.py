"""`HostsGroup`: ranks of several hosts. Shared memory within each host, gloo between the hosts' first ranks.

host A   0 ─┐ shared          all-reduce   1  each host reduces to its first rank
         1 ─┤ memory                       2  the first ranks reduce among each other, through gloo
host B   2 ─┤                              3  each first rank gives the result to its host
         3 ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, PrefixStore, ReduceOp, Store, Work

from polytempo.native.group import Group
from polytempo.torch.backend.named import NamedGroup
from polytempo.torch.backend.operands import dense, op_of, reducible
from polytempo.torch.backend.work import Lane

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


class HostsGroup(NamedGroup):
    """A group over several hosts. All-reduce, broadcast and barrier cross the network once for each host.

    K bytes all-reduced over H hosts: each host sends about 2 K (H - 1) / H, however many ranks it has. The other
    collectives, messages and sparse tensors are gloo's, over all ranks.
    """

    def __init__(
        self, store: Store, rank: int, size: int, local: Group, hosts: Sequence[str], timeout: timedelta
    ) -> None:
        super().__init__(store, rank, size, timeout)
        self.local, self._hosts = local, list(hosts)
        self._firsts = [self._hosts.index(host) for host in dict.fromkeys(hosts)]
        self._lane = Lane(lambda: False)
        self._leaders: Any = None
        if rank in self._firsts:
            place = PrefixStore("leaders", store)
            self._leaders = dist.ProcessGroupGloo(place, self._firsts.index(rank), len(self._firsts), timeout)

    @cached_property
    def _gloo(self) -> Any:
        """gloo over all ranks; all of them make it in the first call that needs it."""
        return dist.ProcessGroupGloo(PrefixStore("all", self.store), self.rank(), self.size(), self.timeout)

    def shutdown(self) -> None:
        """Leave the group."""
        self._lane.close()
        self.local.leave()

    abort = shutdown

    # ------------------------------------------------------------------ host by host

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """The reduction of all ranks' tensors, on every rank."""
        if any(tensor.layout != torch.strided for tensor in tensors):
            return self._gloo.allreduce(list(tensors), opts or AllreduceOptions())
        op = op_of(opts, tensors[0].dtype)

        def run() -> None:
            for tensor in tensors:
                flat = dense(tensor)
                self._all_reduce(reducible(flat), op)
                if flat is not tensor:
                    tensor.copy_(flat)

        return self._issue(run, list(tensors), opts)

    allreduce_coalesced = allreduce

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        self.local.all_reduce(tensor, "sum" if op == "average" else op, root=0)
        if self._leaders is not None:
            options = AllreduceOptions()
            options.reduceOp = _GLOO_OPS[op]
            self._leaders.allreduce([tensor], options).wait()
            if op == "average":
                tensor.div_(self.size())
        self._spread(tensor, 0)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Rank `opts.rootRank`'s tensors, on every rank."""
        root = 0 if opts is None else opts.rootRank

        def run() -> None:
            for tensor in tensors:
                flat = dense(tensor)
                self._broadcast(flat, root)
                if flat is not tensor:
                    tensor.copy_(flat)

        return self._issue(run, list(tensors), opts)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        """Within the root's host, between the hosts, and within the others."""
        at_home = self._hosts[self.rank()] == self._hosts[root]
        if at_home:
            self._spread(tensor, [r for r, host in enumerate(self._hosts) if host == self._hosts[root]].index(root))
        if self._leaders is not None:
            options = BroadcastOptions()
            options.rootRank = self._firsts.index(self._hosts.index(self._hosts[root]))
            self._leaders.broadcast([tensor], options).wait()
        if not at_home:
            self._spread(tensor, 0)

    def _spread(self, tensor: Tensor, source: int) -> None:
        mine = self.local.rank == source
        receives = [None if mine or place != source else tensor for place in range(self.local.size)]
        self.local.exchange("broadcast", [tensor] if mine else [], receives, root=source)

    def barrier(self, opts: Any = None) -> Work:
        """Wait until all ranks are here."""

        def run() -> None:
            self.local.barrier()
            if self._leaders is not None:
                self._leaders.barrier().wait()
            self.local.barrier()

        return self._issue(run, [], opts)

    def _issue(self, run: Callable[[], None], result: Any, opts: Any) -> Work:
        return self._lane.issue(run, result, blocking=opts is not None and not opts.asyncOp)

    # ------------------------------------------------------------------ over all ranks, by gloo

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that are missing."""
        self._gloo.monitored_barrier(timeout or self.timeout, wait_all_ranks)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """gloo's."""
        return self._gloo.reduce(list(tensors), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """gloo's."""
        return self._gloo.allgather(outputs, inputs, *_given(opts))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        """gloo's."""
        return self._gloo._allgather_base(output, source, *_given(opts))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """gloo's."""
        return self._gloo.allgather_coalesced(
            [list(output.view(self.size(), -1).unbind()) for output in outputs], [s.reshape(-1) for s in inputs]
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """gloo's."""
        return self._gloo.gather(outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """gloo's."""
        return self._gloo.scatter(outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """gloo's."""
        return self._gloo.reduce_scatter(outputs, inputs, *_given(opts))

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        """gloo's."""
        return self._gloo._reduce_scatter_base(output, source, *_given(opts))

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """gloo's."""
        return self._gloo.alltoall(outputs, inputs, *_given(opts))

    def all_to_all_single(
        self, output: Tensor, source: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> Work:
        """gloo's."""
        return self._gloo.alltoall_base(output, source, list(out_sizes), list(in_sizes), *_given(opts))

    def send(self, tensors: Any, to: int, tag: int = 0) -> Work:
        """gloo's."""
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        """gloo's."""
        return self._gloo.recv(tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """gloo's."""
        return self._gloo.recv_anysource(tensors, tag)


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)
