"""A push or a pull under way while the worker computes, as a part of its transform's state."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from polytempo.core import Late, Op, Port, Work

T = TypeVar("T")


class ConvertedWork(Work[tuple[Any]], frozen=True, eq=False):
    """Work under way whose answer becomes `(convert(answer),)`: `Late` takes its value out of a tuple."""

    convert: Callable[[Any], Any]

    def __await__(self) -> Generator[Op[Any], Any, tuple[Any]]:
        answer = yield Work(self.handle)
        return (self.convert(answer),)


async def begin(port: Port, op: Op[T], convert: Callable[[T], Any]) -> Late:
    """Begin `op`; `settled` waits for it and returns `convert` of its answer, as the state that is to be saved."""
    return Late(ConvertedWork((await port.start(op)).handle, convert), 0)
