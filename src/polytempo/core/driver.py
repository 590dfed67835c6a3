"""The driver of coroutines: of every world, and of what performs a program's operations on a world's behalf.

    value ← nothing
    repeat
        op ← the coroutine, resumed with `value`, or with the error that came instead
        value ← begin(op)                                   stop here where it is WAITING: `resume` brings the answer
    until the coroutine has returned or raised

A world says how an operation is begun, and calls `resume` when one is done.
"""

from __future__ import annotations

from collections.abc import Callable
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
        while not self.done:
            try:
                op = self.coroutine.send(value) if error is None else self.coroutine.throw(error)
            except StopIteration as stop:
                self.done, self.value = True, stop.value
            except Exception as uncaught:
                self.done, self.error = True, uncaught
            else:
                value, error = None, None
                try:
                    value = begin(op)
                except Exception as raised:
                    error = raised
                if value is WAITING:
                    return False
        return True

    def result(self) -> Any:
        """What the coroutine has returned; raises what it has raised."""
        if self.error is not None:
            raise self.error
        return self.value


async def interpreted(program: Program[T], perform: Callable[[Op[Any]], Program[Any]]) -> T:
    """Run `program` inside another one: `await perform(op)` answers each operation that it awaits.

    An Exception of `perform` is raised at the program's `await`. Anything else that `perform` raises ends the program.
    """
    asked: list[Op[Any]] = []

    def begin(op: Op[Any]) -> Any:
        asked.append(op)
        return WAITING

    task = Task(program)
    try:
        over = task.resume(begin)
        while not over:
            value, error = None, None
            try:
                value = await perform(asked.pop())
            except Exception as raised:
                error = raised
            over = task.resume(begin, value, error)
    finally:
        program.close()
    result: T = task.result()
    return result
