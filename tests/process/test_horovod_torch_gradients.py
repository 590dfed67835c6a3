"""Gradients through `polytempo.horovod.torch` at 2 and at 4 ranks, against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import polytempo.horovod.torch as hvd
from horovod_checks import Checks, equal, refused, values

pytestmark = pytest.mark.process

CHECKS = Checks()


def slope(call: Callable[[Tensor], Tensor], at: Tensor, weights: Tensor, rank: int, size: int) -> Tensor:
    """The gradient of Σ over ranks of ⟨weights of the rank, result of the rank⟩, by finite differences."""
    answer = torch.zeros_like(at)
    for owner in range(size):
        for place in range(int(hvd.broadcast(torch.tensor(at.numel()), owner))):
            ends = []
            for shift in (1e-3, -1e-3):
                moved = at.clone()
                if rank == owner:
                    moved.view(-1)[place] += shift
                ends.append(hvd.allreduce((call(moved) * weights).sum().detach(), op=hvd.Sum))
            if rank == owner:
                answer.view(-1)[place] = (ends[0] - ends[1]) / 2e-3
    return answer


@CHECKS.check
def gradients(rank: int, size: int) -> None:
    """All ranks' results together; Horovod's allgather and broadcast give 1/N of it, its reducescatter N times."""
    rows = [1] * (size - 1) + [2]
    cases: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
        "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum, name="gradient"), 1),
        "average": (lambda x: hvd.allreduce(x, prescale_factor=3.0, postscale_factor=0.5), 1),
        "group": (lambda x: torch.cat(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)), 1),
        "allgather": (lambda x: hvd.allgather(x[: rank + 1], name="gather"), 1 / size),
        "broadcast": (lambda x: hvd.broadcast(x, 1), 1 / size),
        "alltoall": (lambda x: hvd.alltoall(x, rows)[0], 1),
        "even alltoall": (lambda x: hvd.alltoall(x[:size]), 1),
        "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Average), size),
        "summing reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.5), size),
    }
    for name, (call, factor) in cases.items():
        at = values(rank, torch.float64, (size + 1, 2)).requires_grad_()
        result = call(at)
        weights = values(50 + rank, torch.float64, tuple(result.shape))
        (found,) = torch.autograd.grad((result * weights).sum(), at)
        expected = factor * slope(call, at.detach(), weights, rank, size)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    at = torch.ones(3, requires_grad=True)
    refused(ValueError, "MAX has no gradient", hvd.allreduce(at, op=hvd.Max).sum().backward)


@CHECKS.check
def gradients_of_groups_and_in_process_sets(rank: int, size: int) -> None:
    """Ranks outside the set keep their tensor, with the identity's gradient."""
    part = hvd.add_process_set(list(range(1, size)))
    inside, others = part.included(), max(size - 1, 1)

    def within(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: call(x) if inside else x * 1.0

    def pair(x: Tensor) -> Tensor:
        return torch.cat(hvd.grouped_allgather([x[: rank + 1], x], name="pair"))

    cases: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
        "grouped allgather": (pair, 1 / size),
        "grouped reducescatter": (lambda x: torch.cat(hvd.grouped_reducescatter([x, x * x])), size),
        "scaled group": (lambda x: torch.cat(hvd.grouped_allreduce([x, x], prescale_factor=0.5, name="scaled")), 1),
        "allreduce in a set": (within(lambda x: hvd.allreduce(x, process_set=part, name="part")), 1),
        "allgather in a set": (within(lambda x: hvd.allgather(x, process_set=part)), 1 / others if inside else 1),
        "broadcast in a set": (within(lambda x: hvd.broadcast(x, 1, process_set=part)), 1 / others if inside else 1),
        "reducescatter in a set": (within(lambda x: hvd.reducescatter(x, process_set=part)), others if inside else 1),
        "alltoall in a set": (within(lambda x: hvd.alltoall(x[:others], process_set=part)), 1),
    }
    for name, (call, factor) in cases.items():
        at = values(rank, torch.float64, (size + 1, 2)).requires_grad_()
        result = call(at)
        weights = values(70 + rank, torch.float64, tuple(result.shape))
        (found,) = torch.autograd.grad((result * weights).sum(), at)
        expected = factor * slope(call, at.detach(), weights, rank, size)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for compressor in (hvd.Compression.fp16, hvd.Compression.bf16):
        at = torch.full((2,), 1.0 + rank, requires_grad=True)
        (hvd.allreduce(at, compression=compressor, op=hvd.Sum) * (1.0 + rank)).sum().backward()
        equal(at.grad, torch.full((2,), sum(range(size + 1)) * 1.0))
    assert hvd.remove_process_set(part)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_of(name: str, size: int) -> None:
    CHECKS.passed(name, size)
