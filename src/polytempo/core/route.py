"""`Route`: how a sum over all ranks travels. `native` leaves it to the world."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from polytempo.core.op import Program
from polytempo.core.port import Port

Route = Callable[[Port, Tensor], Program[Tensor]]
"""Takes a flat buffer (which it may overwrite) and returns the sum of all ranks' buffers."""


class Price(NamedTuple):
    """The cost of an exchange: α–β model, full-duplex links."""

    steps: int
    """Rounds of messages that follow each other."""
    busiest_bytes: float
    """Bytes that the busiest rank sends."""
    seconds: float
    """Wall time when all ranks begin at the same time."""


async def native(port: Port, buffer: Tensor) -> Tensor:
    """The sum by the world's own all-reduce: gloo, NCCL, or a ring's closed form under the virtual clock."""
    return await port.all_reduce(buffer)


def check_route(given: object) -> None:
    """Raise TypeError for anything but a route: a name, a wire route, `hierarchical` without ()."""
    try:
        inspect.signature(given).bind(None, None)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        name = getattr(given, "__name__", repr(given))
        raise TypeError(
            f"a route takes a port and a buffer, and {name} does not; use one of pt.collectives, such as ring or "
            "hierarchical(), or leave out route (routes of pt.compression carry a codec's wires, so they need a codec)"
        ) from None
