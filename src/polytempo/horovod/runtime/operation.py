"""`Operation`: an operation that a program has asked for, until it is done.

On a device `DeviceOrder` puts it between the stream of the program and the stream of its performer:

program's stream      … backward │ given                                   ┌ waits for `over` │ optimizer …
performer's stream               └─▶ waits for `given` │ NCCL │ over ──────┘

No thread waits for a device: streams wait for events. Memory that two streams use is freed once both have done with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polytempo.device import current_stream, marked
from polytempo.horovod.negotiation.message import TensorRequest
from polytempo.horovod.runtime.groups import CodecExchange


class HorovodInternalError(RuntimeError):
    """An operation cannot be performed: ranks asked for different things, or one of them is gone."""


@dataclass(eq=False, slots=True)
class Operation:
    """`tensors`: the inputs, detached; `outputs`: overwritten tensors; the operation makes them if the list is
    empty."""

    request: TensorRequest
    tensors: list[Tensor]
    outputs: list[Tensor]
    exchange: CodecExchange | None = None
    """The exchange of an all-reduce with a codec."""
    done: bool = False
    error: str = ""
    answer: Any = None
    """A further result: received splits, the last rank that joined, a process set's number."""
    order: DeviceOrder | None = None
    """The order of an operation on a device's tensors."""

    def result(self) -> None:
        """Raise the operation's error. On a device the caller's stream waits for the outputs, not the caller."""
        if self.error:
            raise HorovodInternalError(self.error)
        if self.order is not None:
            self.order.give(self.outputs)

    @property
    def is_complete(self) -> bool:
        """True if the outputs are there, or never will be."""
        return self.done and (bool(self.error) or self.order is None or self.order.is_over)


class DeviceOrder:
    """Made where the operation is asked for, on the stream that is current there for `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._given = marked(device)
        self._over: Any = None

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Later work on the current stream finds the tensors as they were given."""
        stream = current_stream(self.device)
        stream.wait_event(self._given)
        for tensor in tensors:
            tensor.record_stream(stream)

    def end(self) -> None:
        """All is on the stream that is current now."""
        self._over = marked(self.device)

    @property
    def is_over(self) -> bool:
        """True if the device has done it."""
        return self._over is not None and bool(self._over.query())

    def give(self, outputs: Iterable[Tensor]) -> None:
        """Later work on the current stream finds the outputs."""
        stream = current_stream(self.device)
        if self._over is not None:
            stream.wait_event(self._over)
        for tensor in outputs:
            tensor.record_stream(stream)


@contextmanager
def in_order(asked: Sequence[tuple[DeviceOrder, Sequence[Tensor]]]) -> Iterator[None]:
    """The work inside comes after all given tensors, and before all answers. On one device."""
    with torch.accelerator.device_index(asked[0][0].device.index):
        for order, tensors in asked:
            order.begin(tensors)
        yield
        for order, _ in asked:
            order.end()
