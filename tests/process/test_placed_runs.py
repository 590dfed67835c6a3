"""Branches on real processes: a virtual world's bits; attached, one process's training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from branch_models import Towers
from polytempo.engines.join.init import init
from polytempo.worlds import ProcessWorld
from process.crew import together
from split_models import made, on_ranks, squares

pytestmark = pytest.mark.process

X = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def in_mesh(num_ranks: int, work: Callable[[ProcessWorld], Any], **mesh: int) -> list[Any]:
    """The value of `work(world)` on each of `num_ranks` processes in this layout."""
    return together(num_ranks, lambda world: work(init(mesh=mesh, quiet=True)))


def model() -> nn.Module:
    return Towers(towers=3)


def test_both_worlds_compute_the_same_bits() -> None:
    def numbers(**place: Any) -> list[Any]:
        net = pt.training.place(made(model), sample=X, **place)
        output = net(X)
        squares(output).backward()
        return [output.tolist(), {name: gradient.tolist() for name, gradient in net.full_gradients().items()}]

    virtual = on_ranks(3, lambda port: numbers(port=port))
    assert in_mesh(3, lambda world: numbers(world=world), model=3) == virtual


def trained(net: nn.Module, batches: list[Tensor]) -> None:
    """An ordinary loop."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if torch.distributed.is_initialized():
        pt.attach(net, optimizer, pt.strategies.sync_sgd())
    for batch in batches:
        optimizer.zero_grad()
        squares(net(batch)).backward()
        assert nn.utils.clip_grad_norm_(net.parameters(), 0.5) > 0.5
        optimizer.step()


def test_two_models_on_two_ranks_each() -> None:
    """Both models of a mesh of 2 x 2 get half of the batch, and their gradients are averaged."""

    def work(world: ProcessWorld) -> dict[str, Any]:
        net = pt.training.place(made(model), sample=X, world=world)
        half = X.chunk(2)[world.port.coordinates["data"]]
        trained(net, [half, half])
        return {name: tensor.tolist() for name, tensor in net.full_parameters().items()}

    whole = made(model)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([squares(whole(half)) for half in X.chunk(2)]).mean().backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
    for found in in_mesh(4, work, data=2, model=2):
        for name, parameter in whole.named_parameters():
            there = torch.tensor(found[name], dtype=torch.float64)
            torch.testing.assert_close(there, parameter.detach(), rtol=1e-12, atol=1e-12)
