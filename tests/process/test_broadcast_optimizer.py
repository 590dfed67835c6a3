"""Rank 0's optimizer state arrives on all ranks as rank 0 has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from polytempo.engines.processes.worker import Result
from polytempo.training.checkpoint.optimizer_state import broadcast_optimizer
from polytempo.worlds import ProcessWorld
from process.crew import together

pytestmark = pytest.mark.process


def stepped(optimizer: Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.arange(parameter.numel(), dtype=parameter.dtype).reshape(parameter.shape) / 7
        parameter.grad = parameter.grad.contiguous(memory_format=torch.channels_last)
    optimizer.step()


def test_state_that_is_laid_out_channels_last_is_not_permuted() -> None:
    def work(world: ProcessWorld) -> Result:
        layer = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = SGD(layer.parameters(), lr=0.1, momentum=0.9)
        if world.rank == 0:
            stepped(optimizer)
            assert not optimizer.state[layer.weight]["momentum_buffer"].is_contiguous()
        world.drive(broadcast_optimizer(world.port, optimizer))
        momentum: Tensor = optimizer.state[layer.weight]["momentum_buffer"]
        return [float(value) for value in momentum.flatten()]

    first, second = together(2, work)
    assert first == second == [float(value) for value in torch.arange(48) / torch.tensor(7.0)]


def test_a_learning_rate_that_is_a_tensor_stays_one_on_every_rank() -> None:
    def work(world: ProcessWorld) -> Result:
        weight = nn.Parameter(torch.ones(1, 2, 1, 1))
        optimizer = Adam([weight], lr=torch.tensor(0.1 if world.rank == 0 else 0.2), foreach=False)
        world.drive(broadcast_optimizer(world.port, optimizer))
        stepped(optimizer)
        rate: Any = optimizer.param_groups[0]["lr"]
        return [type(rate).__name__, str(rate.dtype), float(rate), weight.flatten().tolist()]

    first, second = together(2, work)
    assert first == second
    assert first[:2] == ["Tensor", "torch.float32"]
