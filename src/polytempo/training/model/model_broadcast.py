"""One rank's parameters and buffers for the others."""

from __future__ import annotations

import torch
from torch import nn

from polytempo.core import Bundle, Port
from polytempo.training.model.tensor_groups import by_kind


async def broadcast_model(
    port: Port,
    model: nn.Module,
    shared: frozenset[str] = frozenset(),
    *,
    source: int = 0,
    into: frozenset[int] | None = None,
) -> None:
    """Give the parameters and buffers of `source` to the ranks in `into` (None: to all); not parameters in `shared`."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if name not in shared}
    everything = parameters | dict(model.named_buffers())
    for group in by_kind(everything).values():
        bundle = Bundle(group)
        flat = await port.broadcast(bundle.flat, source)
        if port.rank != source and (into is None or port.rank in into):
            torch._foreach_copy_(list(group.values()), list(bundle.with_flat(flat).views.values()))
