"""State for newcomers of an elastic run, and residuals of ranks that leave: one rank that stays takes over their sum.

A residual is in the unit of the exchange, shareᵢ · xᵢ (`compression/`), so the applied updates and all residuals add up
to all gradients. This sum is kept when a rank leaves politely, and when the ranks' shares change. A rank that is killed
takes its residual with it.

model, optimizer         as `attach` hands them out
place in the data, time, schedule, the account of samples       one JSON text
the strategy's state     tensors as they are; residuals begin at zero, for each rank's residual is its own
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port, State
from polytempo.core.state import Residual, Saved
from polytempo.training.checkpoint.optimizer_state import broadcast_optimizer
from polytempo.training.model.agree import broadcast_model, gather_json


async def hand_over_model(port: Port, model: nn.Module, optimizer: Optimizer, newcomers: frozenset[int]) -> None:
    """Give rank 0's parameters, buffers and optimizer state to `newcomers`. All ranks call it."""
    await broadcast_optimizer(port, optimizer, into=newcomers)
    await broadcast_model(port, model, into=newcomers)


async def broadcast_buffers(port: Port, model: nn.Module) -> None:
    """Give rank 0's buffers to all: some may have met with a rank that is lost, others not."""
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


def residuals_by_path(states: Iterable[tuple[str, State]]) -> dict[str, Tensor | None]:
    """Each residual of a rank's states, under the path that `core.state.saved` gives it; None: nothing so far."""
    return {path: residual for name, state in states for path, residual in _residuals(state, name)}


def _residuals(state: Any, path: str) -> Iterator[tuple[str, Tensor | None]]:
    if isinstance(state, Residual):
        yield f"{path}/0", state.residual
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _residuals(value, f"{path}/{key}")
    elif isinstance(state, tuple):
        for i, value in enumerate(state):
            yield from _residuals(value, f"{path}/{i}")


async def handed_over(port: Port, mine: dict[str, Tensor | None], *, leaves: bool) -> Saved | None:
    """This rank's residuals from the ranks that leave; None: none. All ranks of the group call it.

    The first rank that stays takes over all. Cost: a text from each rank, and an all-reduce for each residual of a rank
    that leaves; nothing without residuals.
    """
    layout = {
        path: None if t is None else [list(t.shape), str(t.dtype).removeprefix("torch.")] for path, t in mine.items()
    }
    told = await gather_json(port, {"leaves": leaves, "layout": layout})
    staying = [rank for rank, each in enumerate(told) if not each["leaves"]]
    wanted: dict[str, Any] = {}
    for each in told:
        if each["leaves"]:
            wanted |= {path: form for path, form in each["layout"].items() if form is not None}
    if not staying:
        return None
    taken: dict[str, Tensor] = {}
    for path, (shape, dtype) in sorted(wanted.items()):
        own = mine.get(path)
        given = own.detach().clone() if leaves and own is not None else torch.zeros(shape, dtype=getattr(torch, dtype))
        taken[path] = await port.all_reduce(given.contiguous())
    return Saved(taken, {}) if taken and port.rank == staying[0] else None


async def handed_over_by_islands(
    port: Port, island: Port, mine: dict[str, Tensor | None], *, leaves: bool
) -> Saved | None:
    """`handed_over` within each island; residuals of an island that leaves as a whole go to the first rank that stays.

    All ranks of the group call it. Cost: three texts from each rank, and the all-reduces of `handed_over`.
    """
    found = await handed_over(island, mine, leaves=leaves)
    as_a_whole = all(await gather_json(island, leaves))
    others = await handed_over(port, mine if as_a_whole else dict.fromkeys(mine), leaves=leaves)
    if found is None or others is None:
        return found or others
    both = [each.tensors for each in (found, others)]
    paths = sorted({path for tensors in both for path in tensors})
    return Saved({path: torch.stack([t[path] for t in both if path in t]).sum(0) for path in paths}, {})
