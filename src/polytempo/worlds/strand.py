"""`Strand`: a coroutine of a real rank, from its launch to its end."""

from __future__ import annotations

from typing import Any, Protocol

from polytempo.core import WAITING, Op, Program, Task
from polytempo.worlds.pending import Pair, Pending


class Performer(Protocol):
    """The world that a coroutine runs in (`worlds.process.ProcessWorld`)."""

    def perform(self, op: Op[Any]) -> Any:
        """The answer, or what has to be waited for."""


class Strand:
    """A coroutine under way, or finished. `waits_for`: what it stands at, where it is neither."""

    __slots__ = ("task", "waits_for", "world")

    def __init__(self, world: Performer, coroutine: Program[Any]) -> None:
        self.world, self.task = world, Task(coroutine)
        self.waits_for: Pending | Pair | Strand | None = None

    @property
    def done(self) -> bool:
        """Whether the coroutine is over."""
        return self.task.done

    def wait(self) -> Any:
        """What the coroutine returns, once it has."""
        self.advance(block=True)
        return self.task.result()

    def advance(self, *, block: bool) -> None:
        """Run until finished, or, without `block`, until something has to be waited for."""
        while not self.done:
            value, error = None, None
            if self.waits_for is not None:
                if not block and not self.waits_for.done:
                    return
                try:
                    value = self.waits_for.wait()
                except Exception as raised:
                    error = raised
                self.waits_for = None
            self.task.resume(self._begin, value, error)

    def _begin(self, op: Op[Any]) -> Any:
        answer = self.world.perform(op)
        if isinstance(answer, Pending | Pair | Strand):
            self.waits_for = answer
            return WAITING
        return answer
