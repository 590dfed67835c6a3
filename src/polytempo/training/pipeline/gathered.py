"""The whole model of a pipeline on every rank: each stage's parameters and buffers, by the model's own names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from polytempo.core import Bundle, Port
from polytempo.partition.cut import Cut, Stage
from polytempo.partition.tensor.parted_model import joined
from polytempo.training.model.ports import Ports
from polytempo.training.model.tensor_groups import by_kind
from polytempo.training.pipeline.split_stage import cut_parameters
from polytempo.training.step.replica import Replica


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
    with replica.in_float32():  # what other stages have in 16 bits is float32 here
        likes = [_tensors(cut.stages[stage::num_stages]) for stage in range(num_stages)]
    found: dict[str, Tensor] = {}
    for stage, tensors in enumerate(likes):
        for group in by_kind(tensors).values():
            bundle = Bundle({name: mine[name] if stage == ports.model.rank else t for name, t in group.items()}).copy()
            flat = await ports.model.broadcast(bundle.flat, stage)
            found |= {name: torch.clone(view) for name, view in bundle.with_flat(flat).views.items()}
    return found


def _tensors(parts: Iterable[Stage]) -> dict[str, Tensor]:
    modules = [part.module for part in parts]
    return {n: t.detach() for module in modules for n, t in [*module.named_parameters(), *module.named_buffers()]}
