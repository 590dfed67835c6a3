"""What becomes of residuals when ranks leave a group politely: one rank that stays takes over their sum.

A residual is in the unit of the exchange, shareᵢ · xᵢ (`compression/`), so what has been applied and all residuals add
up to all gradients. That sum is kept when a rank leaves politely, and when the ranks' shares change. Of a rank that is
killed it is lost with its memory: then what is missing is exactly that rank's residual.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from polytempo.core import Port, State
from polytempo.core.state import Residual, Saved
from polytempo.training.model.agree import gather_json


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
    """What this rank takes over from those that leave; None: nothing. All ranks of the group call it.

    The first rank that stays takes over all. Cost: a text from each rank, and an all-reduce for each residual of those
    that leave; nothing is sent where no rank has residuals.
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
