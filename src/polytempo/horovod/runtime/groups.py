"""Transports that perform collectives: one for each process set, unknown to torch; and means by a codec."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceOp,
    ReduceScatterOptions,
    Store,
    _DistributedBackendOptions,
)

from polytempo.aggregation.adasum import adasum
from polytempo.compression import through
from polytempo.compression.exchange.wire_route import Exchanged
from polytempo.core import Bundle, Codec, State, Transform
from polytempo.device import is_host
from polytempo.interop.backend.across_hosts import HostsGroup
from polytempo.interop.backend.create import Options, create
from polytempo.interop.backend.named import NamedGroup
from polytempo.worlds import ProcessWorld

_OPS = {
    "sum": ReduceOp.SUM,
    "average": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}


class SetTransport:
    """Collectives of `ranks`, in the place of rank `rank`: shared memory within a host, gloo between hosts; NCCL for
    tensors on CUDA, as the backend `polytempo` hands them on.

    All of `ranks` make it together; meanwhile `look` is called now and then, and may raise. A set of one rank has none,
    and moves nothing.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        look: Callable[[], None] | None = None,
    ) -> None:
        self.ranks, self.size, self.position = tuple(ranks), len(ranks), list(ranks).index(rank)
        self._group: Any = None
        self._world: ProcessWorld | None = None
        self._reductions: dict[ReduceOp.RedOpType, AllreduceOptions] = {}
        self.carrier = "LOCAL"
        """Where tensors travel, in the words of a timeline."""
        if self.size > 1:
            options = _DistributedBackendOptions()
            options.store, options.group_rank, options.group_size = PrefixStore(name, store), self.position, self.size
            options.timeout, options.global_ranks_in_group = timedelta(seconds=timeout_s), list(ranks)
            self._group = create(options, Options(while_connecting=look))
            self.carrier = "SHARED" if isinstance(self._group, NamedGroup) else "GLOO"
            if isinstance(self._group, HostsGroup):
                self.carrier = "HIERARCHICAL"

    def reduce_(self, tensor: Tensor, op: str) -> None:
        """`tensor`, contiguous, becomes the reduction of all ranks' tensors."""
        if self._group is None or not tensor.numel():
            return
        averages = (
            op == "average" and tensor.dtype != torch.bool and is_host(tensor) and isinstance(self._group, NamedGroup)
        )
        self._group.allreduce([tensor], self._reduction(ReduceOp.AVG if averages else _OPS[op])).wait()
        if op == "average" and not averages:
            divide_(tensor, self.size)

    def _reduction(self, op: ReduceOp.RedOpType) -> AllreduceOptions:
        if op not in self._reductions:
            options = self._reductions[op] = AllreduceOptions()
            options.reduceOp, options.asyncOp = ReduceOp(op), False
        return self._reductions[op]

    def adasum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each of `tensors`, of one dtype, by the adaptive sum of all ranks' tensors (`aggregation.adasum`)."""
        transform = adasum()
        bundle = Bundle({str(place): tensor for place, tensor in enumerate(tensors)})
        answer, _ = self.transformed(transform, bundle, transform.init(bundle))
        for tensor, view in zip(tensors, answer.views.values(), strict=True):
            tensor.copy_(view)

    def transformed(self, transform: Transform, bundle: Bundle, state: State) -> tuple[Bundle, State]:
        """The answer of a transform of gradients here, with equal weights of all ranks, and its next state."""
        if self._world is None:
            self._world = ProcessWorld(self.position, [0] * self.size, group=self._group)
        answer, after = self._world.drive(transform.apply(self._world.port, bundle, state))
        assert answer is not None
        return answer, after

    def broadcast_(self, tensor: Tensor, root: int) -> None:
        """`tensor`, contiguous, receives the values of world rank `root`."""
        if self._group is not None and tensor.numel():
            options = BroadcastOptions()
            options.rootRank, options.asyncOp = self.ranks.index(root), False
            self._group.broadcast([tensor], options).wait()

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """`sends[p]` goes to position p, `receives[p]` comes from there; all contiguous, of one dtype. One tensor in
        `sends` goes to all."""
        if self._group is None:
            receives[0].copy_(sends[0])
        elif is_host(receives[0]) and isinstance(self._group, NamedGroup):
            self._group.alltoall(list(receives), list(sends)).wait()
        else:
            given = list(sends) * (self.size if len(sends) == 1 else 1)
            arrived = receives[0].new_empty(sum(tensor.numel() for tensor in receives))
            numbers = [tensor.numel() for tensor in receives], [tensor.numel() for tensor in given]
            flat = torch.cat([tensor.reshape(-1) for tensor in given])
            self._group.alltoall_base(arrived, flat, *numbers, AllToAllOptions()).wait()
            for tensor, part in zip(receives, arrived.split(numbers[0]), strict=True):
                tensor.view(-1).copy_(part)

    def reduce_scatter_(self, pieces: Sequence[Tensor], output: Tensor, op: str) -> None:
        """`output` becomes the reduction of all ranks' `pieces[own position]`, all as long as `output`. An average is
        left as the sum."""
        if self._group is None:
            output.copy_(pieces[0])
        elif output.numel():
            options = ReduceScatterOptions()
            options.reduceOp, options.asyncOp = ReduceOp(_OPS[op]), False
            self._group.reduce_scatter([output], [list(pieces)], options).wait()

    def close(self) -> None:
        """Leave. Ranks that still wait for this one raise `PeerLost`."""
        group, self._group, self._world = self._group, None, None
        if group is not None:
            group.abort()


def divide_(tensor: Tensor, number: int) -> None:
    """tensor ← tensor / number. Integers are rounded toward zero."""
    if number == 1 or tensor.dtype == torch.bool:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(number)
    else:
        tensor.div_(number, rounding_mode="trunc")


_Layout = tuple[torch.dtype, tuple[torch.Size, ...]]
Kept = tuple[int, dict[_Layout, Exchanged]]
"""A copy of an exchange's memory."""


class CodecExchange:
    """Made by the program, for one name; all ranks make theirs with equal codecs. Wires travel as `through` decides.

    The unsent residuals belong to it, by dtype and shapes. `step` counts its exchanges: all ranks draw by it.
    """

    def __init__(self, codec: Codec) -> None:
        self.name = codec.facts.name
        self._transform = through(codec)
        self._states: dict[_Layout, Exchanged] = {}
        self.step = 0

    def average_(self, transport: SetTransport, tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors, all of one dtype, to their means. With one rank only the residual is added."""
        layout = next(iter(tensors.values())).dtype, tuple(tensor.shape for tensor in tensors.values())
        bundle = Bundle(tensors)
        state = self._states[layout] if layout in self._states else self._transform.init(bundle)
        answer, after = transport.transformed(self._transform, bundle, state._replace(step=self.step))
        self.step, self._states[layout] = after.step, after
        for tensor, view in zip(tensors.values(), answer.views.values(), strict=True):
            tensor.copy_(view)

    def kept(self) -> Kept:
        """A copy of its memory."""
        return copy.deepcopy((self.step, self._states))

    def go_to(self, kept: Kept) -> None:
        """Remember this instead."""
        self.step, self._states = copy.deepcopy(kept)


def encodable(tensors: Sequence[Tensor]) -> bool:
    """True if a codec takes at least one of them: floating-point numbers."""
    return any(tensor.is_floating_point() for tensor in tensors)
