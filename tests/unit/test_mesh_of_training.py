"""Meshes that do not say which ranks hold the same parameters: refused wherever something is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.training.model.ports import ports_of
from polytempo.worlds import ProcessWorld
from staged_job import plain

s = pt.strategies


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def piped(world: ProcessWorld, stages: int) -> object:
    sgd, sample = partial(SGD, lr=0.1), torch.zeros(2, 4)
    return pt.pipeline(net(), sgd, nn.functional.mse_loss, s.one_f_one_b(stages), sample=sample, world=world)


def attached(world: ProcessWorld) -> object:
    model = net()
    return pt.attach(model, SGD(model.parameters(), lr=0.1), world=world)


TRAINED: dict[str, Callable[[ProcessWorld], object]] = {
    "attach": attached,
    "shard": lambda world: pt.shard(TensorDataset(torch.zeros(4, 4)), batch_size=1, world=world),
    "hybrid": lambda world: pt.hybrid(net(), ["0"], world=world),
    "pipeline": lambda world: piped(world, 2),
    "one stage": lambda world: piped(world, 1),
    "Trainer": lambda world: pt.Trainer(plain(), s.sync_sgd(), world=world, steps=1),
    "Trainer of stages": lambda world: pt.Trainer(plain(), s.one_f_one_b(2), world=world, steps=1),
    "Trainer of parts": lambda world: pt.Trainer(plain(), s.split({"0": "column"}), world=world, steps=1),
}


def laid_out(mesh: Mapping[str, int]) -> ProcessWorld:
    world = ProcessWorld(0, [0, 0, 0, 0])
    world.port = world.port.meshed(**mesh)
    return world


@pytest.mark.parametrize("what", TRAINED)
@pytest.mark.parametrize("mesh", [{"dp": 4}, {"stage": 2, "dp": 2}])
def test_a_mesh_without_data_is_refused_before_anything_is_sent(mesh: dict[str, int], what: str) -> None:
    """The ranks along "dp" would train models that never meet."""
    with pytest.raises(ValueError, match=r"has no axis 'data'.* write pt.init\(mesh=\{.*'data': .*\}\)"):
        TRAINED[what](laid_out(mesh))


def test_a_mesh_of_other_stages_is_not_laid_out_anew() -> None:
    with pytest.raises(ValueError, match="has 1 stages, and the schedule 2"):
        piped(laid_out({"data": 4}), 2)


@pytest.mark.parametrize("mesh", [{"stage": 4}, {"model": 4}, {"model": 2, "stage": 2}, {"data": 1, "tensor": 4}])
def test_parts_of_one_model_need_no_data(mesh: dict[str, int]) -> None:
    ports = ports_of(laid_out(mesh).port)
    assert (ports.data.size, ports.model.size) == (1, 4)
