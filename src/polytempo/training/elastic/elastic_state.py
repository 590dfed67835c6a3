"""What newcomers of an elastic run get from a living member, over the group that they have just formed with it.

model, optimizer         as `attach` hands them out
place in the data, time, schedule, the account of samples       one JSON text
the strategy's state     tensors as they are; residuals begin at zero, for each rank's residual is its own
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port
from polytempo.core.state import Saved
from polytempo.training.checkpoint.optimizer_state import broadcast_optimizer
from polytempo.training.model.model_broadcast import broadcast_model


async def hand_over_model(port: Port, model: nn.Module, optimizer: Optimizer, newcomers: frozenset[int]) -> None:
    """Give rank 0's parameters, buffers and optimizer state to `newcomers`. All ranks call it."""
    await broadcast_optimizer(port, optimizer, into=newcomers)
    await broadcast_model(port, model, into=newcomers)


async def broadcast_buffers(port: Port, model: nn.Module) -> None:
    """Give rank 0's buffers to all: some may have met with those that are lost, others not."""
    for buffer in model.buffers():
        received = await port.broadcast(buffer.detach().clone(memory_format=torch.contiguous_format))
        if port.rank:
            buffer.copy_(received)


async def broadcast_json(port: Port, value: Any) -> Any:
    """Rank 0's JSON-able `value`, on every rank."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = int(await port.broadcast(torch.tensor([text.numel()])))
    given = text if port.rank == 0 else torch.empty(length, dtype=torch.uint8)
    return json.loads(bytes((await port.broadcast(given)).tolist()))


async def broadcast_saved(port: Port, own: Saved) -> Saved:
    """Rank 0's saved state, on every rank; the device of tensors is the CPU."""
    layout = {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in own.tensors.items()}
    about = await broadcast_json(port, {"layout": layout, "scalars": own.scalars})
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in about["layout"].items():
        given = torch.empty(shape, dtype=getattr(torch, dtype))
        if port.rank == 0:
            given = own.tensors[name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        tensors[name] = await port.broadcast(given)
    return Saved(tensors, about["scalars"])
