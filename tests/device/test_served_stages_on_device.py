"""Stages with parameter servers in a user's loop on a device: refused by name. Jobs are in `test_jobs`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.worlds import ProcessWorld

pytestmark = pytest.mark.process

crew = pytest.importorskip("device.crew")


def test_a_loop_with_servers_for_stages_is_refused(device: str) -> None:
    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)).to(card)
        strategy = pt.parse_strategy("one_f_one_b(stages=2, inner=async_sgd())")
        with pytest.raises(ValueError, match=f"PT1903: device={device}"):
            pt.pipeline(
                net,
                lambda parameters: torch.optim.SGD(parameters, lr=0.05),
                nn.functional.mse_loss,
                strategy,
                sample=torch.zeros(8, 6, device=card),
            )
        return {}

    crew.check_all(crew.together(device, 2, work))
