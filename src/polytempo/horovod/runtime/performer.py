"""`Performer`: performs the negotiated operations in the same order on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from polytempo.device import HOST
from polytempo.horovod.negotiation.message import WHOLE, Agreement, TensorRequest
from polytempo.horovod.runtime.groups import CodecExchange, SetTransport, divide_
from polytempo.horovod.runtime.operation import Operation, in_order

_COPIED_BYTES = 512 << 10
"""Tensors of fewer bytes are copied into a common one."""
Phase = Callable[[str], None]
"""Hears which part of an operation begins, by Horovod's names for them."""
MakeTransport = Callable[[int, Sequence[int]], SetTransport]
"""The transport of a process set: its number and ranks."""


class Performer:
    """Rank `rank`'s. `sets`: the existing process sets; `make` makes the transport of a set that has this rank."""

    def __init__(self, rank: int, sets: Mapping[int, Sequence[int]], make: MakeTransport) -> None:
        self._rank, self._make = rank, make
        self.phase: Phase = lambda _: None
        self.joins_on = -1
        """The device of the zeros that this rank brings once it has joined; -1: the current one."""
        self._transports: dict[int, SetTransport] = {}
        try:
            for number, ranks in sorted(sets.items()):
                if rank in ranks:
                    self._transports[number] = make(number, ranks)
        except BaseException:
            self.close()
            raise

    def perform(self, agreements: Sequence[Agreement], operations: Sequence[Operation | None]) -> None:
        """Perform all of them as one. An operation is None on a rank that has joined, and outside the process set."""
        first = agreements[0].request
        transport = self._transports.get(first.process_set)
        if transport is None:
            return
        if first.device == HOST.type:
            self._perform(transport, agreements, operations)
            return
        if transport.carrier == "GLOO":
            raise ValueError("tensors on a device need the native core on all ranks, and one has none")
        there = [operation for operation in operations if operation is not None]
        asked = [(each.order, (*each.tensors, *each.outputs)) for each in there if each.order is not None]
        with in_order(asked) if asked else nullcontext():
            self._perform(transport, agreements, operations)

    def _perform(
        self, transport: SetTransport, agreements: Sequence[Agreement], operations: Sequence[Operation | None]
    ) -> None:
        first = agreements[0].request
        if first.kind == "allreduce":  # nothing here has a gradient: operations hold detached tensors
            self._all_reduce(transport, agreements, operations)
        elif first.kind == "add_set":
            self._add_set(agreements[0], operations[0])
        elif first.kind == "remove_set":
            self._remove_set(first)
        elif operations[0] is not None:
            self._one(transport, agreements[0], operations[0])

    def close(self) -> None:
        """Leave all transports."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    # ------------------------------------------------------------------ reductions

    def _all_reduce(
        self, transport: SetTransport, agreements: Sequence[Agreement], operations: Sequence[Operation | None]
    ) -> None:
        request = agreements[0].request
        results: list[Tensor] = []
        for agreed, operation in zip(agreements, operations, strict=True):
            if operation is None:
                results += zeros(agreed.request, self.joins_on)
                continue
            if not operation.outputs:
                operation.outputs = [
                    torch.empty_like(t, memory_format=torch.contiguous_format) for t in operation.tensors
                ]
            pairs = zip(operation.outputs, operation.tensors, strict=True)
            for output, tensor in pairs if operation.outputs is not operation.tensors else ():
                if output.data_ptr() != tensor.data_ptr() or output.stride() != tensor.stride():
                    output.copy_(tensor)
            results += operation.outputs
        exchange = None if operations[0] is None else operations[0].exchange
        for same in _by_dtype(results):
            if exchange is not None and same[0].is_floating_point():
                self.phase(f"{transport.carrier}_CODEC_ALLREDUCE")
                reduce_encoded_(transport, same, request, exchange)
            else:
                reduce_together_(transport, same, request, self.phase)

    def _one(self, transport: SetTransport, agreed: Agreement, operation: Operation) -> None:
        if operation.tensors:
            self.phase(f"{transport.carrier}_{agreed.request.kind.upper()}")
        match agreed.request.kind:
            case "allgather":
                operation.outputs = [
                    _gathered(transport, tensor, [rows[place] for rows in agreed.sizes])
                    for place, tensor in enumerate(operation.tensors)
                ]
            case "broadcast":
                _broadcast(transport, operation, agreed.request.root)
            case "alltoall":
                _all_to_all(transport, operation, agreed.sizes)
            case "reducescatter":
                operation.outputs = [_scattered(transport, tensor, agreed.request) for tensor in operation.tensors]
            case "join":
                operation.answer = agreed.sizes[0][0]

    # ------------------------------------------------------------------ process sets

    def _add_set(self, agreed: Agreement, operation: Operation | None) -> None:
        ((number,),) = agreed.sizes
        ranks = sorted(agreed.request.numbers)
        if self._rank in ranks:
            self._transports[number] = self._make(number, ranks)
        if operation is not None:
            operation.answer = number

    def _remove_set(self, request: TensorRequest) -> None:
        transport = self._transports.pop(request.numbers[0], None)
        assert request.numbers[0] != WHOLE
        if transport is not None:
            transport.close()


def _by_dtype(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    if len(tensors) == 1:
        return [tensors]
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return found.values()


def zeros(request: TensorRequest, number: int = -1) -> list[Tensor]:
    """The contribution of a rank that has joined; on an accelerator on its device `number`, -1: the current one."""
    device = torch.device(request.device, number) if request.device != HOST.type and number >= 0 else request.device
    pairs = zip(request.shapes, request.dtypes, strict=True)
    return [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in pairs]


def reduce_together_(transport: SetTransport, tensors: Sequence[Tensor], request: TensorRequest, phase: Phase) -> None:
    """Replace each of `tensors`, of one dtype, by postscale · op over ranks of prescale · tensor.

    Large ones travel alone: copying them to others and back would cost more than an operation of their own.
    """
    small: list[Tensor] = []
    for tensor in tensors:
        if tensor.nbytes < _COPIED_BYTES or request.op == "adasum":
            small.append(tensor)
        else:
            _reduce_as_one_(transport, [tensor], request, phase)
    if small:
        _reduce_as_one_(transport, small, request, phase)


def _reduce_as_one_(transport: SetTransport, tensors: Sequence[Tensor], request: TensorRequest, phase: Phase) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        flat = tensors[0]
    else:
        phase("MEMCPY_IN_FUSION_BUFFER")
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    phase(f"{transport.carrier}_{'ADASUM_' if request.op == 'adasum' else ''}ALLREDUCE")
    if request.prescale != 1.0:
        scale_(flat, request.prescale)
    if request.op == "adasum":
        sizes = [tensor.numel() for tensor in tensors]
        transport.adasum_([part.view(t.shape) for part, t in zip(flat.view(-1).split(sizes), tensors, strict=True)])
    else:
        # in one dimension: on another rank it may not have lain in one piece
        transport.reduce_(flat if flat.dim() == 1 else flat.view(-1), request.op)
    if request.postscale != 1.0:
        scale_(flat, request.postscale)
    if flat is not tensors[0]:
        phase("MEMCPY_OUT_FUSION_BUFFER")
        parts = flat.view(-1).split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(list(tensors), [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])


def reduce_encoded_(
    transport: SetTransport, tensors: Sequence[Tensor], request: TensorRequest, exchange: CodecExchange
) -> None:
    """Like `reduce_together_`, for sums and averages, by a codec."""
    for tensor in tensors:
        scale_(tensor, request.prescale)
    exchange.average_(transport, {f"{request.name}.{place}": tensor for place, tensor in enumerate(tensors)})
    factor = request.postscale * (transport.size if request.op == "sum" else 1)
    for tensor in tensors:
        scale_(tensor, factor)


def scale_(tensor: Tensor, factor: float) -> None:
    """tensor ← factor · tensor. Integers are multiplied in float64, and rounded toward zero."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))


def scattered_rows(rows: int, size: int) -> list[int]:
    """The rows of a reduce-scatter that each rank gets: the first ones one more, if they cannot be equal."""
    return [rows // size + (place < rows % size) for place in range(size)]


def _scattered(transport: SetTransport, tensor: Tensor, request: TensorRequest) -> Tensor:
    source = tensor.contiguous()
    if request.prescale != 1.0:
        source = source.clone()
        scale_(source, request.prescale)
    rows = scattered_rows(len(tensor), transport.size)
    pieces = list(source.split(rows))
    output = source.new_empty((rows[0], *tensor.shape[1:]))
    if rows[-1] != rows[0]:
        missing = source.new_zeros((1, *tensor.shape[1:]))
        pieces = [piece if len(piece) == rows[0] else torch.cat([piece, missing]) for piece in pieces]
    transport.reduce_scatter_(pieces, output, request.op)
    output = output[: rows[transport.position]]
    if request.op == "average":
        divide_(output, transport.size)
    scale_(output, request.postscale)
    return output


def _gathered(transport: SetTransport, tensor: Tensor, rows: Sequence[int]) -> Tensor:
    whole = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    transport.exchange([tensor.contiguous()], list(whole.split(list(rows))))
    return whole


def _broadcast(transport: SetTransport, operation: Operation, root: int) -> None:
    outputs = operation.outputs or [
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in operation.tensors
    ]
    is_root = transport.ranks[transport.position] == root
    for output, tensor in zip(outputs, operation.tensors, strict=True):
        if is_root and output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        flat = output if output.is_contiguous() else output.contiguous()
        transport.broadcast_(flat, root)
        if flat is not output:
            output.copy_(flat)
    operation.outputs = outputs


def _all_to_all(transport: SetTransport, operation: Operation, splits: Sequence[Sequence[int]]) -> None:
    (tensor,) = operation.tensors
    own, received = list(splits[transport.position]), [given[transport.position] for given in splits]
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    transport.exchange(list(tensor[: sum(own)].contiguous().split(own)), list(output.split(received)))
    operation.outputs, operation.answer = [output], received
