"""Stages with parameter servers in a user's loop on a device: the CPU's bits, and each stage stays on its card."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.runs.own_loop import loop_link, pipeline  # loaded once, before ranks are forked
from polytempo.worlds import ProcessWorld

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

crew = pytest.importorskip("device.crew")
WARM = loop_link, pipeline
BATCHES = 6
STRATEGIES = [
    "one_f_one_b(stages=2, micro_batches=2, inner=async_sgd(shards=2))",
    "ddg(stages=2, lockstep=True, inner=async_sgd())",
    "pipedream(stages=2, inner=downpour(push_every=2, pull_every=2))",
]


def model() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def samples() -> torch.utils.data.TensorDataset:
    x = torch.randn(8 * BATCHES, 6, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :2].sin())


def trained(strategy: str, where: torch.device) -> dict[str, torch.Tensor]:
    net = model().to(where)
    pipe = pt.pipeline(
        net,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        nn.functional.mse_loss,
        pt.parse_strategy(strategy),
        sample=torch.zeros(8, 6, device=where),
    )
    for x, y in pt.shard(samples(), batch_size=8):
        pipe.step(x.to(where), y.to(where))
    found: dict[str, torch.Tensor] = pipe.state_dict()
    pipe.detach()
    assert {parameter.device for parameter in pipe.model.parameters()} == {where}
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pipeline_with_servers_ends_with_the_cpus_values(device: str, strategy: str) -> None:
    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        there, here = trained(strategy, card), trained(strategy, torch.device("cpu"))
        tolerance = 0.0 if device == "pretend" else 1e-3
        return {
            name: f"{there[name]} instead of {value}"
            for name, value in here.items()
            if not torch.allclose(there[name].cpu(), value, rtol=tolerance, atol=tolerance)
        }

    crew.check_all(crew.together(device, 2, work, timeout_s=150))
