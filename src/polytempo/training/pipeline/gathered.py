"""The whole model of a pipeline on every rank: each stage's parameters and buffers, by the model's own names."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.core import Bundle, Port
from polytempo.partition.cut import Cut
from polytempo.partition.tensor.parted_model import joined
from polytempo.training.pipeline.split_stage import cut_parameters
from polytempo.training.ports import Ports
from polytempo.training.replica import Replica
from polytempo.training.tensor_groups import by_kind


async def gathered(
    ports: Ports, replica: Replica, cut: Cut, num_stages: int, holders: Port | None
) -> dict[str, Tensor]:
    """The mean over replicas where they differ; in the order of the parts. Cost: every stage broadcasts once.

    `holders`: the ranks that hold this stage's split layers together, where it has such.
    """
    await replica.settle()
    mine = await replica.consensus(ports.data) | dict(replica.model.named_buffers())
    mine |= await replica.consensus_buffers(ports.data)
    if holders is not None:
        mine = await joined(holders, mine, cut_parameters(replica.model))
    found: dict[str, Tensor] = {}
    for stage in range(num_stages):
        parts = cut.stages[stage::num_stages]
        likes = {n: t for part in parts for n, t in [*part.module.named_parameters(), *part.module.named_buffers()]}
        for group in by_kind({name: tensor.detach() for name, tensor in likes.items()}).values():
            bundle = Bundle({name: mine[name] if stage == ports.model.rank else t for name, t in group.items()}).copy()
            flat = await ports.model.broadcast(bundle.flat, stage)
            found |= {name: torch.clone(view) for name, view in bundle.with_flat(flat).views.items()}
    return found
