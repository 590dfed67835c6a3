"""Stages with parameter servers in a user's loop on a device: the CPU's bits. Jobs are in `test_jobs`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.spec.result import parameters_sha256

pytestmark = pytest.mark.process

crew = pytest.importorskip("device.crew")
SAMPLES = 24
STRATEGY = "one_f_one_b(stages=2, micro_batches=2, inner=async_sgd(shards=2))"
"""With one worker for each stage a server gets its pushes in one order, so the CPU repeats."""


def points() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :2].sin())


def trained(place: torch.device | str) -> tuple[str, Any]:
    """(the model's hash, the ledger of samples) after an epoch of this rank's loop."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 2)).to(place)
    pipe = pt.pipeline(
        net,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        nn.functional.mse_loss,
        pt.parse_strategy(STRATEGY),
        sample=torch.zeros(8, 6, device=place),
    )
    for x, y in pt.shard(points(), batch_size=8):
        pipe.step(x.to(place), y.to(place))
    state = pipe.state_dict()
    assert {tensor.device.type for tensor in state.values()} == {torch.device(place).type}
    pipe.detach()
    return parameters_sha256(tensor.cpu() for tensor in state.values()), pipe.account


def test_a_loop_with_servers_for_stages_ends_with_the_cpus_bits(device: str) -> None:
    """Products of received activations rounded by the activations' places in messages, so equal loops differed, on
    the CPU too."""
    found = crew.together(device, 2, lambda world, card: trained(card))
    expected = crew.together(device, 2, lambda world, card: trained("cpu"))
    (row,) = found[0][1]["ledger"]
    assert (row["once"], row["twice"], row["never"]) == (SAMPLES, 0, 0)
    assert found[0][0] == found[1][0]
    if device == "pretend":
        assert found[0][0] == expected[0][0]
