"""Comparisons between ranks: slices that leave out nothing, and a majority that names the rank that differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polytempo.training.hooks.drift import DriftLook, DriftVerdict, Walk, judged, look_of

BIG = torch.arange(1_200_000.0)
TENSORS: dict[str, list[Tensor]] = {
    "one small tensor": [torch.arange(10.0)],
    "one large tensor": [BIG],
    "large, transposed": [BIG.reshape(1200, 1000).t()],
    "large and small": [torch.arange(3.0), BIG, torch.tensor(1.0), BIG[:777_777], torch.arange(5.0)],
    "many small tensors": [torch.full((100,), float(i)) for i in range(500)],
    "of 100 MiB": [torch.zeros(26_214_400, dtype=torch.float32)],
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_pass_sees_every_element_once(name: str) -> None:
    tensors, walk = TENSORS[name], Walk()
    passes = []
    for _ in range(2):  # the second pass begins where the first one ended
        pieces: list[Tensor] = []
        count = 0
        while sum(piece.numel() for piece in pieces) < sum(t.numel() for t in tensors):
            count += 1
            slice_ = walk.next(tensors)
            assert sum(piece.nbytes for piece in slice_) <= max(2**20, 2 * sum(t.nbytes for t in tensors) // 63)
            pieces += [piece.flatten() for piece in slice_]
        assert count <= walk.num_slices
        passes.append(torch.cat(pieces))
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    assert all(torch.equal(each, whole) for each in passes)


def look(tensors: int = 0, *, steps: int = 7, settings: int = 0) -> DriftLook:
    return DriftLook(steps, 1, tensors, 0, settings, 1, 1)


@pytest.mark.parametrize(
    ("looks", "healthy", "others"),
    [
        ([look(), look()], [0, 1], []),
        ([look(), look(1)], [], [0, 1]),
        ([look(), look(1), look()], [0, 2], [1]),
        ([look(1), look(), look()], [1, 2], [0]),
        ([look(), look(steps=6), look()], [0, 2], [1]),
        ([look(), look(), look(settings=2**64 - 1)], [0, 1], [2]),
        ([look(), look(1), look(2)], [], [0, 1, 2]),
        ([look(), look(1), look(1), look()], [], [0, 1, 2, 3]),
        ([look(), look(1), look(2), look(), look()], [0, 3, 4], [1, 2]),
    ],
)
def test_more_than_half_of_the_ranks_say_who_differs(
    looks: list[DriftLook], healthy: list[int], others: list[int]
) -> None:
    assert judged(looks) == DriftVerdict(healthy, others)


def test_what_a_rank_could_afford_is_no_difference() -> None:
    assert judged([look(), look()._replace(every=9, num_slices=3)]).others == []


def test_a_look_travels_as_it_is() -> None:
    said = DriftLook(3, 1, 2**64 - 1, 2**63, 5, 64, 256)
    assert look_of(said.tensor()) == said
