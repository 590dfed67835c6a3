"""A push or a pull that goes on while the worker computes, as a part of its transform's state."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from polytempo.core import Late, Op, Port, Work

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Turned(Work[tuple[Any]]):
    """Something begun, whose answer becomes `(turned(answer),)`: the tuple that `Late` takes its part of."""

    turned: Callable[[Any], Any]

    def __await__(self) -> Generator[Op[Any], Any, tuple[Any]]:
        answer = yield Work(self.handle)
        return (self.turned(answer),)


async def begin(port: Port, op: Op[T], turned: Callable[[T], Any]) -> Late:
    """Begin `op`; `settled` waits for it and gives `turned` of its answer, as the state that is to be saved."""
    return Late(Turned((await port.start(op)).handle, turned), 0)
