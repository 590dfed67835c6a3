"""Operations on tensors outside the CPU: their order on streams, and the errors of ranks that disagree.

Streams and events are lists of calls, so no accelerator is needed.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polytempo.horovod.negotiation.matching import fused, refusal
from polytempo.horovod.negotiation.message import Agreement, TensorRequest
from polytempo.horovod.runtime.operation import DeviceOrder, Operation, in_order
from polytempo.horovod.runtime.performer import zeros

GPU = torch.device("cuda", 0)


class Streams:
    """Stands for an accelerator: `now` is the current stream, `said` each stream's calls."""

    def __init__(self) -> None:
        self.now, self.said, self.reached = "program", list[str](), set[str]()

    def current_stream(self, device: torch.device) -> Any:
        name = self.now

        def record_event() -> Any:
            event = f"{name}.{len(self.said)}"
            self.said.append(f"{name} marks {event}")
            return SimpleNamespace(name=event, query=lambda: event in self.reached)

        wait = lambda event: self.said.append(f"{name} waits for {event.name}")  # noqa: E731
        return SimpleNamespace(name=name, record_event=record_event, wait_event=wait)


class Noted:
    """A tensor that notes the streams that use its memory."""

    def __init__(self) -> None:
        self.used_on = list[str]()

    def record_stream(self, stream: Any) -> None:
        self.used_on.append(stream.name)


def request(device: str = "cuda", name: str = "a") -> TensorRequest:
    return TensorRequest(name, "allreduce", ("float32",), ((3,),), op="sum", device=device)


def test_streams_wait_for_each_other_and_memory_is_kept_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, tensor = Streams(), Noted()
    monkeypatch.setattr(torch.accelerator, "current_stream", streams.current_stream)
    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    given: list[Any] = [tensor]
    operation = Operation(request(), given, given, order=DeviceOrder(GPU))
    assert operation.order is not None
    assert not operation.is_complete
    streams.now = "performer"
    with in_order([(operation.order, given)]):
        streams.said.append("performer reduces")
    operation.done = True
    assert not operation.is_complete, "the device has not done it"
    streams.reached.add("performer.3")
    assert operation.is_complete
    streams.now = "program"
    operation.result()
    assert streams.said == [
        "program marks program.0",
        "performer waits for program.0",
        "performer reduces",
        "performer marks performer.3",
        "program waits for performer.3",
    ]
    assert tensor.used_on == ["performer", "program"]


def test_an_operation_that_failed_is_complete() -> None:
    operation = Operation(request("cpu"), [], [], done=True, error="rank 1 is gone")
    assert operation.is_complete


def test_ranks_with_tensors_on_other_devices_are_told_so() -> None:
    said = refusal({0: request("cpu"), 1: request("cuda")}, (0, 1))
    assert said == "Mismatched devices for allreduce 'a': rank 0 has cpu, rank 1 cuda"


def test_operations_on_other_devices_are_not_fused() -> None:
    asked = [Agreement(request("cpu", "a")), Agreement(request("cuda", "b")), Agreement(request("cpu", "c"))]
    assert [[each.request.name for each in group] for group in fused(asked, 1 << 20)] == [["a", "c"], ["b"]]


def test_a_rank_that_has_joined_brings_zeros_on_the_cpu_where_the_others_are_there() -> None:
    (found,) = zeros(request("cpu"), number=3)
    assert torch.equal(found, torch.zeros(3))
