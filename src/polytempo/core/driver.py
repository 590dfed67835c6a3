"""The driver of coroutines, for every world, and for code that performs a program's operations in a world's place.

    value ← nothing
    repeat
        op ← the coroutine, resumed with `value`, or with the error that came instead
        value ← begin(op)                                   stop here where it is WAITING: `resume` brings the answer
    until the coroutine has returned or raised

A world says how an operation is begun, and calls `resume` when one is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic

from polytempo.core.op import Op, Program, T

WAITING: Final = object()
"""The return value of `begin` for an operation with a later answer."""

Begin = Callable[[Op[Any]], Any]
"""Begins an operation. Returns its answer, or WAITING; its exception is raised at the coroutine's `await`."""


class Task(Generic[T]):
    """A coroutine under way, or finished with `value` or `error`."""

    __slots__ = ("coroutine", "done", "error", "value")

    def __init__(self, coroutine: Program[T]) -> None:
        self.coroutine = coroutine
        self.done = False
        self.value: T | None = None
        self.error: Exception | None = None

    def resume(self, begin: Begin, value: Any = None, error: Exception | None = None) -> bool:
        """Answer the coroutine's operation, and run it until it waits again (False) or is finished (True)."""
        if self.done:
            return True
        send = self.coroutine.send
        while True:
            try:
                op = send(value) if error is None else self.coroutine.throw(error)
            except StopIteration as stop:
                self.done, self.value = True, stop.value
                return True
            except Exception as uncaught:
                self.done, self.error = True, uncaught
                return True
            value = error = None
            try:
                value = begin(op)
            except Exception as raised:
                error = raised
            if value is WAITING:
                return False

    def result(self) -> Any:
        """The coroutine's return value; raises its exception."""
        if self.error is not None:
            raise self.error
        return self.value


async def interpreted(
    program: Program[T], perform: Callable[[Op[Any]], Awaitable[Any]], kinds: tuple[type[Op[Any]], ...] = (Op,)
) -> T:
    """Run `program` inside another one: `await perform(op)` answers each operation of these `kinds` that it awaits.

    The world answers the others. An Exception of `perform` is raised at the program's `await`. Anything else that
    `perform` raises ends the program.
    """
    value, error = None, None
    try:
        while True:
            try:
                op = program.send(value) if error is None else program.throw(error)
            except StopIteration as stop:
                answer: T = stop.value
                return answer
            value = error = None
            try:
                value = await (perform(op) if isinstance(op, kinds) else op)
            except Exception as raised:
                error = raised
    finally:
        program.close()
