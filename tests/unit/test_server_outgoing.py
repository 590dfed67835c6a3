"""Gradients on their way to shards that read them in place: copied where they must be, and never too early reused."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.server.worker.host.lent_gradients import LentGradients


class Room:
    """Memory that shards can read, and its cuts."""

    def __init__(self) -> None:
        self.cut: list[Tensor] = []

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.cut.append(torch.empty(numel, dtype=dtype))
        return self.cut[-1]

    def has(self, tensor: Tensor) -> bool:
        return any(tensor.data_ptr() == mine.data_ptr() for mine in self.cut)


def test_two_pushes_under_way_have_a_buffer_each_and_a_third_takes_the_first_one_s() -> None:
    room = Room()
    outgoing = LentGradients(room.empty, room.has)
    gradients = [torch.full((5,), float(i)) for i in range(3)]
    first = outgoing.lend(gradients[0], "first")
    second = outgoing.lend(gradients[1], "second")
    assert len(room.cut) == 2
    assert first.tolist() == gradients[0].tolist()
    outgoing.take_back("first")
    third = outgoing.lend(gradients[2], "third")
    assert third.data_ptr() == first.data_ptr()
    assert len(room.cut) == 2
    assert second.tolist() == gradients[1].tolist()


def test_what_lies_there_already_is_not_copied() -> None:
    room = Room()
    outgoing = LentGradients(room.empty, room.has)
    there = room.empty(3, torch.float32)
    assert outgoing.lend(there, "push") is there
    outgoing.take_back("push")
    assert len(room.cut) == 1


def test_another_length_or_dtype_gets_memory_of_its_own() -> None:
    room = Room()
    outgoing = LentGradients(room.empty, room.has)
    outgoing.lend(torch.zeros(3), "a")
    outgoing.take_back("a")
    assert outgoing.lend(torch.ones(4, dtype=torch.float64), "b").tolist() == [1.0] * 4
    assert outgoing.lend(torch.empty(0), "c").numel() == 0
