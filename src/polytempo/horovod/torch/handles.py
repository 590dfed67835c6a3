"""Handles: numbers that stand for operations under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from polytempo.horovod.negotiation.message import Kind, TensorRequest
from polytempo.horovod.runtime.groups import CodecExchange
from polytempo.horovod.runtime.operation import DeviceOrder, Operation
from polytempo.horovod.torch.process_state import PROCESS, Outstanding, ProcessSet, ProcessState

Answer = Callable[[Operation], Any]
Later = Callable[[], Any]
"""The answer of a sparse operation instead of a number: called, it waits."""


def begin(
    process: ProcessState,
    kind: Kind,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    answer: Answer,
    *,
    outputs: Sequence[Tensor] = (),
    exchange: CodecExchange | None = None,
    op: str = "",
    root: int = -1,
    prescale: float = 1.0,
    postscale: float = 1.0,
    numbers: tuple[int, ...] = (),
) -> int:
    """Submit an operation, and answer its handle. In place, `outputs` is `tensors` itself. Those without a name are
    matched by their order within their process set and kind. The others are fields of `TensorRequest`."""
    session, number = process.opened(), process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} is not registered; call add_process_set first, on all ranks")
    full = f"{kind}.noname.{session.unnamed[number, kind]}" if name is None else f"{kind}.{name}"
    device = _device_of(full, tensors)
    request = TensorRequest(
        full,
        kind,
        tuple([_dtype_name(tensor.dtype) for tensor in tensors]),
        tuple([tuple(tensor.shape) for tensor in tensors]),
        op,
        root,
        number,
        prescale,
        postscale,
        numbers,
        "" if exchange is None else exchange.name,
        name is not None,
        "cpu" if device is None else device.type,
    )
    given = _detached(tensors)
    operation = Operation(request, given, given if outputs is tensors else _detached(outputs), exchange)
    if device is not None:
        operation.order = DeviceOrder(device)
    session.runtime.submit(operation)
    if name is None:
        session.unnamed[number, kind] += 1
    handle = next(process.handle_numbers)
    process.outstanding[handle] = Outstanding(operation, answer)
    return handle


def _device_of(name: str, tensors: Sequence[Tensor]) -> torch.device | None:
    """The device of all tensors; None: they are on the CPU. ValueError where they are elsewhere, or apart."""
    if (len(tensors) == 1 and tensors[0].is_cpu) or all(tensor.is_cpu for tensor in tensors):
        return None
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ValueError(f"{name}: tensors of one operation are on one device, got {devices}")
    if tensors[0].is_meta:
        raise ValueError(f"{name}: tensors on meta have no values to send; make them on the CPU or on a device")
    return tensors[0].device


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def poll(handle: int) -> bool:
    """True if the operation was done before this call, which moves it on; `synchronize` does not wait then."""
    if handle not in PROCESS.outstanding:
        raise ValueError(f"handle {handle} is not known; it may have been synchronized already")
    operation = PROCESS.outstanding[handle].operation
    was_done = operation.is_complete
    PROCESS.opened().runtime.done(operation)
    return was_done


def synchronize(handle: int | Later) -> Any:
    """Wait for an operation, and answer its result. None for a handle that has been synchronized already.

    Raises `HorovodInternalError` where ranks disagree about the operation, or one of them is gone.
    """
    if not isinstance(handle, int):
        return handle()
    outstanding = PROCESS.outstanding.pop(handle, None)
    if outstanding is None:
        return None
    operation = outstanding.operation
    if operation.done:
        operation.result()
    else:
        PROCESS.opened().runtime.wait(operation)
    return outstanding.answer(operation)


def refuse(process: ProcessState, handle: int, reason: str) -> NoReturn:
    """Raise ValueError for an operation that was begun only so that the other ranks hear that it cannot be."""
    del process.outstanding[handle]
    raise ValueError(reason)


def only(operation: Operation) -> Tensor:
    """The answer of an operation on one tensor."""
    return operation.outputs[0]


def every(operation: Operation) -> list[Tensor]:
    """The answer of a grouped operation."""
    return operation.outputs
