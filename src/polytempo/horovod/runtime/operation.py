"""`Operation`: what a program has asked for, until it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polytempo.horovod.negotiation.message import TensorRequest
from polytempo.horovod.runtime.codec_exchange import CodecExchange
from polytempo.horovod.runtime.device_order import DeviceOrder


class HorovodInternalError(RuntimeError):
    """An operation cannot be performed: ranks asked for different things, or one of them is gone."""


@dataclass(eq=False, slots=True)
class Operation:
    """`tensors`: what goes in, detached; `outputs`: what is overwritten; the operation makes it where it is empty."""

    request: TensorRequest
    tensors: list[Tensor]
    outputs: list[Tensor]
    exchange: CodecExchange | None = None
    """By which an all-reduce with a codec is performed."""
    done: bool = False
    error: str = ""
    answer: Any = None
    """Besides the outputs: received splits, the last rank that joined, a process set's number."""
    order: DeviceOrder | None = None
    """Of an operation on tensors on CUDA."""

    def result(self) -> None:
        """Raise what went wrong. On CUDA the caller's stream waits for the outputs, not the caller."""
        if self.error:
            raise HorovodInternalError(self.error)
        if self.order is not None:
            self.order.give(self.outputs)

    @property
    def is_complete(self) -> bool:
        """Whether the outputs are there, or never will be."""
        return self.done and (bool(self.error) or self.order is None or self.order.is_over)
