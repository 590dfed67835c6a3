"""A batch with parts from several workers is one update, when it is closed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from msgspec import structs
from torch import Tensor

from polytempo.core.rule import Service, UpdateRule
from polytempo.server.layout import Empty, Parameter, Span, Spans, plain_empty
from polytempo.server.message import COORDINATOR, Lend, Lent, Members, Push, Pushed, Reply, Reshape
from polytempo.server.rules.coverage import covered
from polytempo.server.shard.shard import Shard

NUMEL, SLICES, CLOSING = 6, 4, 4
WHOLE: Spans = (Span(0, NUMEL),)
SERVICE = Service(covered(SLICES, bound=1), UpdateRule("adam", betas=(0.5, 0.9)))
PARTS = torch.randn(2, 3, NUMEL, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
"""Two batches of three parts each; the third closes."""


def shard(number: int = 0, spans: Spans = WHOLE, empty: Empty = plain_empty) -> Shard:
    weights = torch.ones(sum(end - begin for begin, end in spans), dtype=torch.float64)
    return Shard(number, (Parameter("w", NUMEL),), spans, weights, SERVICE, native=False, empty=empty)


def push(worker: int, sequence: int, batch: int, numbers: tuple[int, ...], gradient: Tensor) -> Push:
    tickets = tuple(batch * (SLICES + 1) + number for number in numbers)
    return Push(worker, 1, sequence, 1, 0, 1, (0.1,), tickets, gradient)


STORY = [
    push(1, 1, 0, (3,), PARTS[0, 0]),  # worker 1 helps with batch 0
    push(0, 1, 1, (3,), PARTS[1, 0]),  # worker 0 helps with batch 1
    push(1, 2, 0, (2,), PARTS[0, 1]),
    push(1, 3, 1, (0, 1, CLOSING), PARTS[1, 2]),  # worker 0's parts are there
    push(0, 2, 0, (0, 1, CLOSING), PARTS[0, 2]),
]


def expected() -> Tensor:
    """Two steps of torch's Adam: batch 1 without the part that is missing, then batch 0."""
    weights = torch.ones(NUMEL, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.1, betas=(0.5, 0.9), foreach=False)
    for gradient in (PARTS[1, 0] + PARTS[1, 2], PARTS[0].sum(0)):
        weights.grad = gradient.clone()
        optimizer.step()
    return weights.detach()


def begun(spans: Spans = WHOLE, empty: Empty = plain_empty) -> Shard:
    found = shard(spans=spans, empty=empty)
    found.apply(Members(COORDINATOR, 1, 1, ((0, 1), (1, 1))))
    return found


def applied(server: Shard, entry: Push, cut: slice = slice(None)) -> list[Reply]:
    return server.apply(structs.replace(entry, gradient=entry.gradient[cut].clone()))


def test_an_update_is_a_whole_batch() -> None:
    server = begun()
    versions = []
    for entry in STORY:
        (reply,) = applied(server, entry)
        assert isinstance(reply, Pushed)
        assert reply.verdict == "applied"
        versions.append(reply.version)
    assert versions == [0, 0, 0, 1, 2]
    torch.testing.assert_close(server.weights, expected(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("cut", range(len(STORY)))
def test_parts_are_in_a_copy_of_the_state(cut: int) -> None:
    server, copy = begun(), shard()
    for entry in STORY[:cut]:
        applied(server, entry)
    copy.load(*server.dump())
    for entry in STORY[cut:]:
        applied(server, entry)
        applied(copy, entry)
        assert torch.equal(server.weights, copy.weights)
    assert server.version == copy.version == 2


@pytest.mark.parametrize("cut", range(len(STORY)))
def test_parts_move_with_their_elements(cut: int) -> None:
    """Shard 0 gives its last two elements to shard 1, which is new."""
    old, new = begun(), shard(1, ())
    for entry in STORY[:cut]:
        applied(old, entry)
    stays, goes = (Span(0, 4),), (Span(4, NUMEL),)
    (piece,) = old.apply(Lend(COORDINATOR, 1, 2, goes))
    assert isinstance(piece, Lent)
    new.apply(Reshape(COORDINATOR, 1, 1, goes, (piece,)))
    old.apply(Reshape(COORDINATOR, 1, 3, stays))
    asked = Counter[int]()
    for entry in STORY[cut:]:
        asked[entry.worker] += 1
        applied(old, entry, slice(0, 4))
        applied(new, structs.replace(entry, sequence=asked[entry.worker]), slice(4, NUMEL))
    torch.testing.assert_close(torch.cat([old.weights, new.weights]), expected(), rtol=1e-14, atol=1e-14)


def test_memory_of_sums_is_used_again() -> None:
    """Twenty batches, two at a time, need no more than two sums."""
    taken: list[int] = []

    def empty(numel: int, dtype: torch.dtype) -> Tensor:
        taken.append(numel)
        return plain_empty(numel, dtype)

    server = begun(empty=empty)
    sums = len(taken) + 2
    for batch in range(0, 40, 2):
        first = batch + 1
        applied(server, push(1, first, batch, (3,), PARTS[0, 0]))
        applied(server, push(0, first, batch + 1, (3,), PARTS[1, 0]))
        applied(server, push(1, first + 1, batch + 1, (0, 1, 2, CLOSING), PARTS[1, 1]))
        applied(server, push(0, first + 1, batch, (0, 1, 2, CLOSING), PARTS[0, 1]))
    assert server.version == 40
    assert len(taken) == sums
