"""The driver of coroutines: of every world, and of what performs a program's operations on a world's behalf.

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
"""What `begin` returns for an operation whose answer comes later."""

Begin = Callable[[Op[Any]], Any]
"""Begins an operation. Returns its answer, or WAITING; what it raises is raised at the coroutine's `await`."""


class Task(Generic[T]):
    """A coroutine under way, or finished: then `value` is what it returned, or `error` what it raised."""

    __slots__ = ("coroutine", "done", "error", "value")

    def __init__(self, coroutine: Program[T]) -> None:
        self.coroutine = coroutine
        self.done = False
        self.value: T | None = None
        self.error: Exception | None = None

    def resume(self, begin: Begin, value: Any = None, error: Exception | None = None) -> bool:
        """Answer what the coroutine waits for, and run it until it waits again (False) or is finished (True)."""
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
        """What the coroutine has returned; raises what it has raised."""
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
