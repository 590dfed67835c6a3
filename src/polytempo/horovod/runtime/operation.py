"""`Operation`: what a program has asked for, until it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polytempo.horovod.negotiation.message import TensorRequest
from polytempo.horovod.runtime.codec_exchange import CodecExchange


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

    def result(self) -> None:
        """Raise what went wrong."""
        if self.error:
            raise HorovodInternalError(self.error)
