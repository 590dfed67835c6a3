"""`SharedMemoryGroup`: torch.distributed's interface over `polytempo.native.Group`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceScatterOptions, Store, Work

from polytempo.core.errors import TimedOut
from polytempo.device import accelerator_kind, backend_of, device_group, is_host
from polytempo.interop.backend.exchange_counts import ExchangeCounts
from polytempo.interop.backend.named import NamedGroup
from polytempo.interop.backend.operands import (
    CODES,
    check_pieces,
    dense,
    divide_,
    in_core,
    op_of,
    pieces,
    reducible,
    rows,
    sum_of_sparse,
)
from polytempo.interop.backend.staged import placed, received, sent
from polytempo.interop.backend.work import DONE, Courier, Lane, Run
from polytempo.native.call import form_of
from polytempo.native.group import Group

_PATIENCE_S = 0.002


def has_spare_core(num_ranks: int) -> bool:
    """True if this process may use a further core for a thread of each of `num_ranks` ranks."""
    return len(os.sched_getaffinity(0)) >= 2 * num_ranks


def _patience_s(num_ranks: int) -> float:
    """An asynchronous collective waits for so long for the others' programs before it is left to a thread.

    A thread overlaps it with later work if there is a core to spare. Without one, the thread would take its core from
    the program, and the program does better to perform it immediately with the others.
    """
    return 0.0 if has_spare_core(num_ranks) else _PATIENCE_S


def _blocks(opts: Any) -> bool:
    """True if the caller waits immediately. Some options of older versions do not say so: they count as
    asynchronous."""
    return not getattr(opts, "asyncOp", True)


class SharedMemoryGroup(NamedGroup):
    """Ranks of one host. All collectives of one group run in the order of their issue, on every rank.

    `own_devices`: each rank has a device of its own (see `interop.backend.staged`).

    Each answers a `Work`; a blocking call has done its work when it answers. Errors are `PeerLost`, `TimedOut` and
    `Mismatch`, subclasses of the RuntimeError that torch's own backends raise.
    """

    def __init__(self, store: Store, group: Any, timeout: timedelta, own_devices: bool = False) -> None:
        super().__init__(store, group.rank, group.size, timeout)
        self.group, self._own_devices = group, own_devices
        self._lane = Lane(partial(group.issue, _patience_s(group.size)))
        self._courier, self._departures = Courier(group), Lane(lambda: False)
        self._quick = group.quick() if isinstance(group, Group) else None

    def shutdown(self) -> None:
        """Leave the group. Ranks that still wait for this one raise `PeerLost`."""
        self._lane.close()
        self._departures.close()
        self._courier.close()
        self.group.leave()

    abort = shutdown

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """The reduction of all ranks' tensors, on every rank."""
        if self._quick and _blocks(opts) and len(tensors) == 1:
            tensor = tensors[0]
            codes = CODES.get((tensor.dtype, opts.reduceOp.op))
            if codes and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous():
                limit_s = self._limit_s(opts)
                self._count([tensor])
                data = (tensor.data_ptr(), tensor.numel(), form_of(tensor.shape))
                status = self._lane.at_once(self._quick.all_reduce, *codes, *data, limit_s)
                self.group.check(status, "all_reduce", limit_s)
                return DONE
        return self._reduced(list(tensors), opts, -1)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """The reduction of all ranks' tensors, on one rank."""
        return self._reduced(list(tensors), opts, opts.rootRank)

    def _reduced(self, tensors: list[Tensor], opts: Any, root: int) -> Work:
        first = tensors[0]
        if (theirs := self._between_devices(first)) is not None:
            return theirs.allreduce(tensors, opts) if root < 0 else theirs.reduce(tensors, opts)
        op = op_of(opts, first.dtype)
        core_op, mark = in_core(op, first.dtype)
        limit_s, place = self._limit_s(opts), placed(tensors, tensors)

        def run() -> None:
            place.arrive()
            for tensor in map(place, tensors):
                if tensor.layout != torch.strided:
                    sum_of_sparse(self.group, tensor, op, limit_s)
                    continue
                flat = dense(tensor)
                real = reducible(flat)
                form = form_of(real.shape, mark)
                self.group.all_reduce(real, core_op, root=root, timeout_s=limit_s, form=form)
                if root in (-1, self.rank()):
                    divide_(flat, mark, self.size())
                if flat is not tensor:
                    tensor.copy_(flat)
            place.leave()

        self._count(tensors)
        return self._lane.issue(self._timed(run), tensors, blocking=_blocks(opts))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        """Each rank's piece of the reduction."""
        if (theirs := self._between_devices(outputs[0])) is not None:
            return theirs.reduce_scatter(outputs, inputs, opts)
        op, mark = in_core(op_of(opts, outputs[0].dtype), outputs[0].dtype)
        limit_s, place = self._limit_s(opts), placed([piece for given in inputs for piece in given], outputs)

        def run() -> None:
            place.arrive()
            for output, given in zip(map(place, outputs), inputs, strict=True):
                check_pieces(given, output, self.size(), "reduce_scatter")
                flat = dense(output)
                sources = [reducible(place(piece).contiguous()) for piece in given]
                real = reducible(flat)
                form = form_of(real.shape, mark)
                self.group.reduce_scatter(sources, real, op, timeout_s=limit_s, form=form)
                divide_(flat, mark, self.size())
                if flat is not output:
                    output.copy_(flat)
            place.leave()

        self._count([piece for given in inputs for piece in given])
        return self._lane.issue(self._timed(run), list(outputs), blocking=_blocks(opts))

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        """Like `reduce_scatter`, from one tensor that holds all pieces."""
        if (theirs := self._between_devices(output)) is not None:
            return theirs._reduce_scatter_base(output, source, ReduceScatterOptions() if opts is None else opts)
        return self.reduce_scatter([output], [pieces(source, output, self.size(), "reduce_scatter")], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several of them."""
        cut = [pieces(s, o, self.size(), "reduce_scatter") for s, o in zip(inputs, outputs, strict=True)]
        return self.reduce_scatter(outputs, cut, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------------ moving tensors

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Rank `opts.rootRank`'s tensors, on every rank."""
        if (theirs := self._between_devices(tensors[0])) is not None:
            return theirs.broadcast(tensors, opts)
        root = 0 if opts is None else opts.rootRank
        moves = [([t] if self.rank() == root else [], self._from(root, t, self.rank() != root)) for t in tensors]
        return self._moved("broadcast", moves, list(tensors), opts, root)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """All ranks' tensors, on every rank."""
        if (theirs := self._between_devices(inputs[0])) is not None:
            return theirs.allgather(outputs, inputs, opts)
        moves = [([source], list(into)) for source, into in zip(inputs, outputs, strict=True)]
        return self._moved("all_gather", moves, [list(into) for into in outputs], opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several of them, listed by rank first."""
        return self.allgather([list(by_rank) for by_rank in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        """All ranks' tensors, in one tensor."""
        return self.all_gather_single_coalesced([output], [source], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several of them."""
        if (theirs := self._between_devices(inputs[0])) is not None:
            return [theirs._allgather_base(into, source) for source, into in zip(inputs, outputs, strict=True)][-1]
        moves = [
            ([source], pieces(output, source, self.size(), "all_gather"))
            for source, output in zip(inputs, outputs, strict=True)
        ]
        return self._moved("all_gather", moves, list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Work:
        """All ranks' tensors, on one rank."""
        if (theirs := self._between_devices(inputs[0])) is not None:
            return theirs.gather(outputs, inputs, opts)
        receives = list(outputs[0]) if self.rank() == opts.rootRank else [None] * self.size()
        return self._moved("gather", [(list(inputs), receives)], list(outputs), opts, opts.rootRank)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Work:
        """One rank's tensors, a piece for each rank."""
        if (theirs := self._between_devices(outputs[0])) is not None:
            return theirs.scatter(outputs, inputs, opts)
        sends = list(inputs[0]) if self.rank() == opts.rootRank else []
        moves = [(sends, self._from(opts.rootRank, outputs[0], True))]
        return self._moved("scatter", moves, list(outputs), opts, opts.rootRank)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Each rank's tensors, a piece for each rank."""
        if (theirs := self._between_devices(inputs[0])) is not None:
            return theirs.alltoall(outputs, inputs, opts)
        return self._moved("all_to_all", [(list(inputs), list(outputs))], list(outputs), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Like `alltoall`, within one tensor each; sizes are rows, all equal if none are given."""
        if (theirs := self._between_devices(source)) is not None:
            return theirs.alltoall_base(output, source, output_sizes, input_sizes, opts)
        sends = rows(source, input_sizes, self.size())
        return self._moved("all_to_all", [(sends, rows(output, output_sizes, self.size()))], [output], opts)

    alltoall_base = all_to_all_single

    def _from(self, source: int, tensor: Tensor, wanted: bool) -> list[Tensor | None]:
        return [tensor if wanted and rank == source else None for rank in range(self.size())]

    def _moved(
        self,
        kind: str,
        moves: Sequence[tuple[Sequence[Tensor], Sequence[Tensor | None]]],
        result: Any,
        opts: Any,
        root: int = 0,
    ) -> Work:
        limit_s = self._limit_s(opts)
        wanted = [tensor for _, receives in moves for tensor in receives if tensor is not None]
        place = placed([tensor for sends, _ in moves for tensor in sends], wanted)

        def run() -> None:
            place.arrive()
            for sends, receives in moves:
                targets = [None if tensor is None else place(tensor) for tensor in receives]
                into = [None if tensor is None else dense(tensor) for tensor in targets]
                self.group.exchange(kind, [place(t).contiguous() for t in sends], into, root=root, timeout_s=limit_s)
                for tensor, flat in zip(targets, into, strict=True):
                    if tensor is not None and flat is not None and flat is not tensor:
                        tensor.copy_(flat)
            place.leave()

        self._count([tensor for sends, _ in moves for tensor in sends])
        return self._lane.issue(self._timed(run), result, blocking=_blocks(opts))

    # ------------------------------------------------------------------ counts

    def tally(self) -> ExchangeCounts:
        """The counts of this group's collectives, from the first call on."""
        if self._lane.tally is None:
            self._lane.tally = ExchangeCounts()
        return self._lane.tally

    def _count(self, given: Sequence[Tensor]) -> None:
        if self._lane.tally is not None:
            self._lane.tally.count(sum(tensor.nbytes for tensor in given))

    def _timed(self, run: Run) -> Run:
        return run if self._lane.tally is None else partial(self._lane.tally.timed, run)

    # ------------------------------------------------------------------ barriers

    def barrier(self, opts: Any = None) -> Work:
        """Wait until all ranks are here."""
        limit_s = self._limit_s(opts)
        blocking = _blocks(opts)
        if blocking and self._quick:
            self.group.check(self._lane.at_once(self._quick.barrier, limit_s), "barrier", limit_s)
            return DONE
        return self._lane.issue(lambda: self.group.barrier(limit_s), [], blocking=blocking)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with an error that names the missing ranks, on every rank and in gloo's words."""
        limit_s = (timeout or self.timeout).total_seconds()
        try:
            self._lane.issue(lambda: self.group.barrier(limit_s), [], blocking=True)
        except TimedOut as error:
            late = [str(self.group.names[rank]) for rank in self.group.missing()]
            who = f"Rank{'s' * (len(late) > 1)} {', '.join(late)}"
            reason = f"{who} failed to pass monitoredBarrier in {1000 * limit_s:.0f} ms"
            raise TimedOut(error.rank, None, "monitored_barrier", limit_s, reason) from error

    # ------------------------------------------------------------------ point to point

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Work:
        """Send; done once it is on its way, and the tensor may be changed."""
        if (theirs := self._between_devices(tensors[0])) is not None:
            return theirs.send(tensors, to, tag)
        return sent(self._departures, tensors[0], self._begin_send, to, tag)

    def send_through_host(self, tensor: Tensor, to: int, tag: int) -> Work:
        """Send a tensor of a device to a rank that receives on its host. It may not change until it is sent."""
        return sent(self._departures, tensor, self._begin_send, to, tag)

    def _begin_send(self, tensor: Tensor, to: int, tag: int) -> Work:
        return self._courier.take(self.group.send(tensor, to, tag), None, self.timeout)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Work:
        """Receive from one rank."""
        if (theirs := self._between_devices(tensors[0])) is not None:
            return theirs.recv(tensors, source, tag)
        return received(tensors[0], self._begin_receive, source, tag)

    def _begin_receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        flat = dense(tensor)
        back = None if flat is tensor else tensor
        return self._courier.take(self.group.receive(flat, source, tag), back, self.timeout)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Receive from the rank that sends first."""
        return self.recv(tensors, -1, tag)

    # ------------------------------------------------------------------ other devices

    @cached_property
    def on_devices(self) -> Any:
        """torch's backend over the same ranks for tensors on devices, as NCCL; made with the first of them. None where
        they travel through the host (`interop.backend.staged`)."""
        kind = accelerator_kind()
        if not self._own_devices or kind is None or backend_of(kind) is None:
            return None
        return device_group(kind, self.store, self.rank(), self.size(), self.timeout)

    def _between_devices(self, tensor: Tensor) -> Any:
        return None if is_host(tensor) else self.on_devices

    def _limit_s(self, opts: Any) -> float:
        given: timedelta | None = getattr(opts, "timeout", None)
        return self._timeout_s if given is None or given.days < 0 else given.total_seconds() or self._timeout_s
