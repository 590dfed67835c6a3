"""The mail world: one process that talks to others through its mailbox alone, as a parameter server's nodes do.

A coroutine advances when it is launched, or while somebody waits. Whoever waits serves all: messages go to the
coroutines that take, in the order in which they have asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from polytempo.core import Deadlock, Port, Program, TimedOut, world_port
from polytempo.core.op import Alone, Compute, Mark, Now, Op, Parcel, Post, Start, Take, Work
from polytempo.worlds.trace import Event, Trace

T = TypeVar("T")

_ALONE_S = 300.0


class Mail(Protocol):
    """What the world needs of a mailbox; `wire.zeromq.Mailbox` is one."""

    def post(self, to: int, message: Any) -> bool:
        """Send without waiting. False where the message was dropped."""

    def take(self, wait_s: float | None = None) -> tuple[int, Any] | None:
        """The next (source, message), or None if none comes within `wait_s`."""


class Lock(Protocol):
    """What keeps the processes of a host apart; `worlds.lock.HostLock` is one."""

    def acquire(self, timeout_s: float) -> bool:
        """Wait for it; whether it is ours."""

    def release(self) -> None:
        """Let the next one in."""


class _Strand:
    """A coroutine under way, or finished."""

    __slots__ = ("_coroutine", "_error", "_followers", "_value", "_world", "done")

    def __init__(self, world: MailWorld, coroutine: Program[Any]) -> None:
        self._world, self._coroutine = world, coroutine
        self.done = False
        self._value: Any = None
        self._error: Exception | None = None
        self._followers: list[_Strand] = []

    def wait(self) -> Any:
        """What the coroutine returns, once it has."""
        while not self.done:
            self._world._serve()
        return self._result()

    def _result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def resume(self, value: Any) -> None:
        """Run with `value` as the answer to what it waits for, until it has to wait again, or is finished."""
        error: Exception | None = None
        while True:
            try:
                op = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as stop:
                return self._finish(stop.value, None)
            except Exception as uncaught:
                return self._finish(None, uncaught)
            value, error = None, None
            try:
                match op:
                    case Take(wait_s):
                        return self._world._await_mail(self, wait_s)
                    case Work(_Strand() as other) if not other.done:
                        return other._followers.append(self)
                    case Work(_Strand() as other):
                        value = other._result()
                    case _:
                        value = self._world._perform(op)
            except Exception as raised:  # at the await, as in the other worlds
                error = raised

    def _finish(self, value: Any, error: Exception | None) -> None:
        self.done, self._value, self._error = True, value, error
        for follower in self._followers:
            follower.join(self)

    def join(self, other: _Strand) -> None:
        """Go on: `other`, for which this one has waited, is finished."""
        raise NotImplementedError
