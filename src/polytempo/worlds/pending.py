"""What a real rank waits for: operations that torch.distributed has under way."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

from polytempo.core import Op
from polytempo.worlds.trace import Event, Trace
from polytempo.worlds.transport import Begun


class Clocked(Protocol):
    """The world that an operation is under way in (`worlds.process.ProcessWorld`)."""

    trace: Trace
    waited_s: float

    def now_s(self) -> float:
        """Seconds since the run began."""

    def translated(self, op: Op[Any], event: Event, error: RuntimeError) -> Exception:
        """A transport's error in this library's words."""


class Pending:
    """An operation under way, or finished. Its line is in the trace once somebody has waited for it."""

    __slots__ = ("answer", "done", "error", "event", "op", "work", "world")

    def __init__(self, world: Clocked, op: Op[Any], event: Event, begun: Begun) -> None:
        self.world, self.op, self.event = world, op, event
        self.work, self.answer = begun
        self.done = self.work is None
        self.error: Exception | None = None
        if self.done:
            world.trace.add(event._replace(end_s=world.now_s()))

    def wait(self) -> Any:
        """The operation's answer, once it is finished."""
        if not self.done:
            self.done = True
            since_s = self.world.now_s()
            try:
                limit_s = self.op.timeout_s
                self.work.wait(*([] if limit_s is None else [timedelta(seconds=limit_s)]))
            except RuntimeError as error:
                self.error = self.world.translated(self.op, self.event, error)
            end_s = self.world.now_s()
            self.world.waited_s += end_s - since_s
            self.world.trace.add(self.event._replace(end_s=end_s))
        if self.error is not None:
            raise self.error
        return self.answer()


class Pair:
    """A receive and a send that are under way together."""

    __slots__ = ("coming", "going")

    def __init__(self, coming: Pending, going: Pending) -> None:
        self.coming, self.going = coming, going

    @property
    def done(self) -> bool:
        """Whether both are."""
        return self.coming.done and self.going.done

    def wait(self) -> Any:
        """What has been received, once both are finished."""
        received = self.coming.wait()
        self.going.wait()
        return received
