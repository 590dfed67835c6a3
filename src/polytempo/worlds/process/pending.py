"""What a strand of a real rank waits for: operations that are under way, or that only the program may begin."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol

from polytempo.core import Op
from polytempo.core.op import Recv, Send
from polytempo.worlds.process.transport import Begun, Held
from polytempo.worlds.trace import Event


class RankWorld(Protocol):
    """The world in which an operation is under way (`worlds.process.ProcessWorld`)."""

    def now_s(self) -> float:
        """Seconds since the run began."""

    def write(self, event: Event) -> None:
        """Put a line into the trace."""

    def waited(self, since_s: float) -> None:
        """The rank has waited for others from `since_s` until now."""

    def translated(self, op: Op[Any], event: Event, error: RuntimeError) -> Exception:
        """A transport's error in this library's words."""

    def perform(self, op: Op[Any]) -> Any:
        """The answer to an operation, or what has to be waited for."""

    def waits_for(self, answer: Any) -> bool:
        """Whether what `perform` returned has to be waited for."""

    @property
    def in_program(self) -> bool:
        """Whether the program itself asks, not a thread that goes on meanwhile."""


class PendingOp:
    """An operation under way, or finished. Its line is in the trace once it has been waited for."""

    __slots__ = ("_arriving", "answer", "done", "error", "event", "op", "work", "world")

    def __init__(self, world: RankWorld, op: Op[Any], event: Event, begun: Begun) -> None:
        self.world, self.op, self.event = world, op, event
        self.work, self.answer = begun
        self.done = self.work is None
        self.error: Exception | None = None
        self._arriving = threading.Lock()
        if self.done:
            world.write(event._replace(end_s=world.now_s()))

    @property
    def is_message(self) -> bool:
        """Whether any thread may wait for it: it is a message, and not one that a device's stream waits for."""
        match self.op:
            case Send(tensor) | Recv(tensor):
                return tensor.device.type == "cpu"
        return False

    @property
    def is_batched(self) -> bool:
        """Whether a device's stream waits for it, not the caller."""
        return isinstance(self.work, Held)

    def start(self) -> None:
        """It is awaited: begin it now, if it is held."""
        if isinstance(self.work, Held):
            try:
                self.work.start()
            except RuntimeError as error:
                raise self.world.translated(self.op, self.event, error) from error

    def arrive(self) -> None:
        """Wait until it is finished, well or not."""
        with self._arriving:
            if self.done:
                return
            since_s = self.world.now_s()
            try:
                limit_s = self.op.timeout_s
                self.work.wait(*([] if limit_s is None else [timedelta(seconds=limit_s)]))
            except RuntimeError as error:
                self.error = self.world.translated(self.op, self.event, error)
            self.done = True
            self.world.waited(since_s)
            self.world.write(self.event._replace(end_s=self.world.now_s()))

    def wait(self) -> Any:
        """The operation's answer, once it is finished."""
        self.arrive()
        if self.error is not None:
            raise self.error
        return self.answer()


class Pair:
    """A receive and a send that are under way together."""

    __slots__ = ("coming", "going")

    def __init__(self, coming: PendingOp, going: PendingOp) -> None:
        self.coming, self.going = coming, going

    @property
    def done(self) -> bool:
        """Whether both are."""
        return self.coming.done and self.going.done

    @property
    def is_message(self) -> bool:
        """Whether any thread may wait for it."""
        return self.coming.is_message

    @property
    def is_batched(self) -> bool:
        """Whether a device's stream waits for it, not the caller."""
        return self.coming.is_batched or self.going.is_batched

    def start(self) -> None:
        """Begin both, if they are held: as one batch."""
        self.coming.start()
        self.going.start()

    def arrive(self) -> None:
        """Wait until the receive is finished and, if it went well, the send."""
        self.coming.arrive()
        if self.coming.error is None:
            self.going.arrive()

    def wait(self) -> Any:
        """What has been received, once both are finished."""
        received = self.coming.wait()
        self.going.wait()
        return received


class Postponed:
    """An operation that only the program begins: when it waits for it."""

    __slots__ = ("op", "world")

    done = is_message = is_batched = False

    def __init__(self, world: RankWorld, op: Op[Any]) -> None:
        self.world, self.op = world, op

    def wait(self) -> Any:
        """Begin it; its answer, once it is finished."""
        answer = self.world.perform(self.op)
        return answer.wait() if self.world.waits_for(answer) else answer
