"""Parameters, optimizer states and plain values of one rank, and batch norms of all: at 2 and at 4 ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polytempo.horovod.torch as hvd
from horovod_checks import Checks, equal, refused

pytestmark = pytest.mark.process

CHECKS = Checks()


@CHECKS.check
def parameters_of_one_rank(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.manual_seed(1)
    expected = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    if rank == 1:
        model.load_state_dict(expected)
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert all(torch.equal(found, expected[name]) for name, found in model.state_dict().items())
    nn.init.constant_(model[0].weight, float(rank))
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    equal(model[0].weight.detach(), torch.zeros(2, 3))
    refused(ValueError, "invalid params", lambda: hvd.broadcast_parameters(3, 0))  # type: ignore[arg-type]
    refused(ValueError, "named_parameters", lambda: hvd.broadcast_parameters([(1, 2)], 0))  # type: ignore[list-item]
    nn.init.constant_(model[0].weight, float(rank))
    hvd.broadcast_parameters(list(model.parameters()), root_rank=1)
    equal(model[0].weight.detach(), torch.ones(2, 3))


@CHECKS.check
def optimizer_states_of_one_rank(rank: int, size: int) -> None:
    """The root has made a step, the others none."""
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1), momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1 * (rank + 1)),
        lambda p: torch.optim.Adagrad(p, lr=0.1 * (rank + 1)),
    ):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = make([parameter])
        if rank == 0:
            parameter.grad = torch.arange(3.0)
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        found = {key: torch.as_tensor(value) for key, value in optimizer.state[parameter].items() if value is not None}
        assert found
        for key in sorted(found):
            equal(hvd.broadcast(found[key], 0), found[key])
    frozen, free = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(2))
    hvd.broadcast_optimizer_state(torch.optim.SGD([frozen, free], lr=0.1), 0)
    assert frozen.grad is None
    equal(free.grad, torch.zeros(2))


@CHECKS.check
def plain_values(rank: int, size: int) -> None:
    value = {"a": [1, 2.5, None, (True, b"x")], 3: {"deep": {1, 2}}, "big": 1 << 80, "t": torch.arange(6).view(2, 3)}
    found = hvd.broadcast_object(value if rank == 1 else None, root_rank=1, name="value")
    assert list(found) == list(value)
    for key in value:
        assert torch.equal(found[key], value[key]) if key == "t" else found[key] == value[key]
    assert hvd.broadcast_object_fn(0)("first" if rank == 0 else None) == "first"
    everything = hvd.allgather_object({"rank": rank, "text": "x" * rank})
    assert everything == [{"rank": r, "text": "x" * r} for r in range(size)]
    refused(TypeError, "no pickle", lambda: hvd.broadcast_object(object() if rank == 0 else None, 0))
    refused(TypeError, "rank 1", lambda: hvd.allgather_object(object() if rank == 1 else 1))


@CHECKS.check
def batch_norms(rank: int, size: int) -> None:
    """Ranks have other numbers of samples; the whole batch on one process is the truth, with its gradients."""
    rows = [3 + r for r in range(size)]
    whole = torch.randn(sum(rows), 4, 2, generator=torch.Generator().manual_seed(5)).double()
    ours, theirs = hvd.SyncBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    for layer in (ours, theirs):
        nn.init.constant_(layer.weight, 1.5)
    mine = whole.split(rows)[rank].clone().requires_grad_()
    reference = whole.clone().requires_grad_()
    for _ in range(2):
        answer, expected = ours(mine), theirs(reference)
    torch.testing.assert_close(answer, expected.split(rows)[rank])
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    answer.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    assert reference.grad is not None
    torch.testing.assert_close(mine.grad, reference.grad.split(rows)[rank])
    torch.testing.assert_close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), theirs.weight.grad)
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(ours(mine), theirs(mine))
    refused(ValueError, "2D", lambda: ours(torch.ones(3)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_of(name: str, size: int) -> None:
    CHECKS.passed(name, size)
