"""`DistributedOptimizer` of `polytempo.horovod.torch` on real processes: values and errors at 2 and at 4 ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo.horovod.torch as hvd
from horovod_checks import Checks, equal, refused
from polytempo.horovod.torch import gradient_reduction
from polytempo.horovod.torch.process_state import PROCESS

pytestmark = pytest.mark.process

CHECKS = Checks()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 4, generator=random).double(), torch.randn(6, 3, generator=random).double()


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = batch(rank, step)
    return (model(inputs) - targets).pow(2).mean()


def alone(size: int, passes: int = 1, scale: float = 1.0, steps: int = 3) -> list[Tensor]:
    """One process that makes the steps of all ranks: gradients are the mean over ranks, the sum over passes."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for each in range(passes):
            for rank in range(size):
                (loss(model, rank, step * passes + each) * (scale / size)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def together(rank: int, passes: int = 1, steps: int = 3, **options: Any) -> list[Tensor]:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if options.pop("by_parameters", False):
        options["groups"] = [[model[0].weight, model[2].bias], [model[0].bias]]
    optimizer = hvd.DistributedOptimizer(
        plain, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(steps):
        optimizer.zero_grad()
        for each in range(passes):
            loss(model, rank, step * passes + each).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@CHECKS.check
def distributed_optimizers(rank: int, size: int) -> None:
    expected = alone(size)
    for options in (
        {},
        {"groups": 2},
        {"num_groups": 1},
        {"by_parameters": True},
        {"gradient_predivide_factor": 4.0},
    ):
        torch.testing.assert_close(together(rank, **options), expected)
    torch.testing.assert_close(together(rank, op=hvd.Sum), alone(size, scale=size))
    torch.testing.assert_close(together(rank, passes=2), alone(size, passes=2))
    torch.testing.assert_close(together(rank, compression=hvd.Compression.fp16), expected, rtol=5e-2, atol=5e-3)


@CHECKS.check
def gradients_that_travel_while_the_backward_pass_goes_on(rank: int, size: int) -> None:
    """A spare core, or other hosts, allow that."""
    before, PROCESS.opened().overlaps = PROCESS.opened().overlaps, True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_reduction, "_FIRST_BYTES", 1)
        patch.setattr(gradient_reduction, "_NEXT_BYTES", 100)
        torch.testing.assert_close(together(rank), alone(size))
        torch.testing.assert_close(together(rank, groups=2, passes=2), alone(size, passes=2))
    PROCESS.opened().overlaps = before


@CHECKS.check
def clipping_between_synchronize_and_step(rank: int, size: int) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    loss(model, rank, 0).backward()
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    equal(hvd.broadcast(norm, 0), norm)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with optimizer.skip_synchronize():
        optimizer.step()
    moved = torch.cat([(p.detach() - b).view(-1) for p, b in zip(model.parameters(), before, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(1e-3).double(), rtol=1e-3, atol=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.zero_grad()
        loss(model, rank, 1).backward()
        optimizer.synchronize()
        optimizer.step()
    assert any("skip_synchronize" in str(warning.message) for warning in caught)


@CHECKS.check
def misused_optimizers(rank: int, size: int) -> None:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    make = hvd.DistributedOptimizer
    refused(ValueError, "unique", lambda: make(plain, [("same", p) for p in model.parameters()]))
    refused(ValueError, "not named", lambda: make(plain, list(model.named_parameters())[1:]))
    refused(ValueError, "tuples", lambda: make(plain, model.parameters()))  # type: ignore[arg-type]
    refused(ValueError, "Average alone", lambda: make(plain, op=hvd.Sum, gradient_predivide_factor=2.0))
    refused(ValueError, "disjoint", lambda: make(plain, groups=[[model[0].weight], [model[0].weight]]))
    refused(ValueError, "at least 1", lambda: make(plain, backward_passes_per_step=0))
    optimizer = make(plain, model.named_parameters())
    loss(model, rank, 0).backward()
    refused(AssertionError, "backward_passes_per_step", lambda: loss(model, rank, 0).backward())
    refused(AssertionError, "zero_grad", optimizer.zero_grad)
    optimizer.step()
    refused(ValueError, "lists of parameters", lambda: make(plain, groups=[["a"]]))
    assert len(set(optimizer._parameter_names.values())) == len(list(model.parameters()))


@CHECKS.check
def closures(rank: int, size: int) -> None:
    """A closure's gradients are reduced; a closure without any leaves the earlier ones."""
    for computes in (True, False):
        model = net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(3):
            value = loss(model, rank, step)
            if not computes:
                optimizer.zero_grad()
                value.backward()

            def closure(value: Tensor = value, optimizer: Any = optimizer, computes: bool = computes) -> Tensor:
                if computes:
                    optimizer.zero_grad()
                    value.backward()
                return value

            assert optimizer.step(closure) is value
        torch.testing.assert_close([p.detach() for p in model.parameters()], alone(size))


@CHECKS.check
def passes_that_change(rank: int, size: int) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=3)
    for _ in range(2):
        loss(model, rank, 0).backward()
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    optimizer.synchronize()
    gathered = hvd.allgather(torch.cat([p.grad.view(-1) for p in model.parameters()])[None])
    assert torch.equal(gathered, gathered[:1].expand_as(gathered))
    with optimizer.skip_synchronize():
        optimizer.step()


@CHECKS.check
def adasum_optimizers(rank: int, size: int) -> None:
    """Ranks with equal batches make the step of one rank alone."""
    model, single = net(), net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), op=hvd.Adasum
    )
    other = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for each, made in ((model, optimizer), (single, other)):
            made.zero_grad()
            loss(each, 0, step).backward()
            made.step()
    torch.testing.assert_close(list(model.parameters()), list(single.parameters()))


@CHECKS.check
def embeddings(rank: int, size: int) -> None:
    for dense in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(size + 1, 2, sparse=True)
        before = table.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=dense
        )
        table(torch.tensor([rank, size])).sum().backward()
        optimizer.step()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        expected = torch.full((size + 1, 2), 1 / size)
        expected[size] = 1.0
        equal(before - table.weight.detach(), expected)


@CHECKS.check
def optimizers_of_a_part(rank: int, size: int) -> None:
    part = hvd.add_process_set([0])
    assert torch.allclose(together(rank, process_set=part)[0], together_alone(rank)[0])
    hvd.remove_process_set(part)


def together_alone(rank: int) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_of(name: str, size: int) -> None:
    CHECKS.passed(name, size)
