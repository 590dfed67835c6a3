"""`Strand`: a coroutine of a real rank, from its launch to its end, and the operations that it waits for."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from polytempo.core import WAITING, Op, Program, Task
from polytempo.core.op import Alone, Compute, Now, Recv, Send, SendReceive, Start, Work
from polytempo.worlds.process.progress_thread import Modes, ProgressThread
from polytempo.worlds.process.transport import Begun, Held
from polytempo.worlds.trace import Event


class Wait(NamedTuple):
    """The begin of a wait for other ranks."""

    since_s: float
    mark: Any
    """The place in the device's stream; None without a device. See `device.StreamPauses`."""


class RankWorld(Protocol):
    """The world of an operation under way (`worlds.process.ProcessWorld`)."""

    def now_s(self) -> float:
        """Seconds since the run began."""

    def write(self, event: Event) -> None:
        """Put a line into the trace."""

    def begin_wait(self) -> Wait:
        """The rank begins to wait for others."""

    def waited(self, wait: Wait) -> None:
        """The wait is over."""

    def translated(self, op: Op[Any], event: Event, error: RuntimeError) -> Exception:
        """A transport's error in this library's words."""

    def perform(self, op: Op[Any]) -> Any:
        """The answer to an operation, or an object to wait for."""

    def waits_for(self, answer: Any) -> bool:
        """True if the result of `perform` has to be waited for."""

    @property
    def in_program(self) -> bool:
        """True if the program itself asks, not a thread that goes on meanwhile."""


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
        """True if any thread may wait for it: it is a message, and not one for a device's stream."""
        match self.op:
            case Send(tensor) | Recv(tensor):
                return tensor.device.type == "cpu"
        return False

    @property
    def is_batched(self) -> bool:
        """True if a device's stream waits for it, not the caller."""
        return isinstance(self.work, Held)

    def start(self) -> None:
        """Begin it now, if it is held: it is awaited."""
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
            wait = self.world.begin_wait()
            try:
                limit_s = self.op.timeout_s
                self.work.wait(*([] if limit_s is None else [timedelta(seconds=limit_s)]))
            except RuntimeError as error:
                self.error = self.world.translated(self.op, self.event, error)
            self.done = True
            self.world.waited(wait)
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
        """True when both are done."""
        return self.coming.done and self.going.done

    @property
    def is_message(self) -> bool:
        """True if any thread may wait for it."""
        return self.coming.is_message

    @property
    def is_batched(self) -> bool:
        """True if a device's stream waits for it, not the caller."""
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
        """The received tensor, once both are finished."""
        received = self.coming.wait()
        self.going.wait()
        return received


class Postponed:
    """An operation that only the program begins, when it waits for it."""

    __slots__ = ("op", "world")

    done = is_message = is_batched = False

    def __init__(self, world: RankWorld, op: Op[Any]) -> None:
        self.world, self.op = world, op

    def wait(self) -> Any:
        """Begin it; its answer, once it is finished."""
        answer = self.world.perform(self.op)
        return answer.wait() if self.world.waits_for(answer) else answer


class Strand:
    """A coroutine under way, or finished. `waits_for`: the operation that it stands at, if it waits.

    `progress`: the thread that may advance it while the program computes, or None.
    """

    __slots__ = (
        "__weakref__",
        "_awaited",
        "_lines",
        "done",
        "modes",
        "progress",
        "taken",
        "task",
        "waits_for",
        "world",
    )

    def __init__(self, world: RankWorld, coroutine: Program[Any], progress: ProgressThread | None = None) -> None:
        self.world, self.task, self.progress = world, Task(coroutine), progress
        self.waits_for: PendingOp | Pair | Postponed | Strand | None = None
        self.done = False
        """True when it is over for the program: a thread's work counts when it is waited for."""
        self.taken = False
        """True if the program advances it now, so that the thread must not."""
        if progress is None:
            return
        self.modes = Modes()
        self._lines: list[Event] = []
        """Lines for the trace, of its operations in the thread."""
        self._awaited: list[Strand] = []
        """Strands that it has waited for in the thread."""

    # ------------------------------------------------------------------ the program

    def wait(self) -> Any:
        """The value of the coroutine, once it is over."""
        if self.progress is None:
            self.advance(block=True)
            return self.task.result()
        wait = self.world.begin_wait()
        with self.progress.taken(self):
            self.world.waited(wait)
            self._tell()
            self.advance(block=True)
        return self.task.result()

    def advance(self, *, block: bool) -> None:
        """Run until finished, or, without `block`, until the caller would have to wait for something."""
        while not self.task.done:
            if self.waits_for is not None and not (block or self.waits_for.done or self.waits_for.is_batched):
                return
            value, error = self._answered()
            with self.progress.changed if self.progress else nullcontext():
                self.task.resume(self._begin, value, error)
        self.done = self.done or self.world.in_program

    def _answered(self) -> tuple[Any, Exception | None]:
        value, error = None, None
        try:
            value = None if self.waits_for is None else self.waits_for.wait()
        except Exception as raised:
            error = raised
        self.waits_for = None
        return value, error

    def _begin(self, op: Op[Any]) -> Any:
        answer = self.world.perform(op)
        if self.world.waits_for(answer):
            self.waits_for = answer
            return WAITING
        return answer

    def _tell(self) -> None:
        """Report the thread's operations to the waiter, as if they had happened now."""
        lines, self._lines = self._lines, []
        for event in lines:
            self.world.write(event)
        awaited, self._awaited = self._awaited, []
        for strand in awaited:
            strand.done = True

    # ------------------------------------------------------------------ the thread of `progress`

    is_batched = False

    @property
    def is_message(self) -> bool:
        """True if the thread may go on with strands that wait for this one: it is over."""
        return self.task.done

    def arrive(self) -> None:
        """Do nothing: it is over."""

    @property
    def awaits_message(self) -> bool:
        """True if it stands at something that the thread may wait for."""
        return self.waits_for is not None and self.waits_for.is_message

    def await_message(self) -> None:
        """Wait for its operation."""
        assert self.awaits_message
        assert not isinstance(self.waits_for, Postponed | None)
        self.waits_for.arrive()

    def advance_by_messages(self) -> None:
        """Run on with a message until it waits for the next one, or for an operation that only the program begins."""
        if isinstance(self.waits_for, Strand):
            self._awaited += [self.waits_for, *self.waits_for._awaited]
        with self.modes.set():
            value, error = self._answered()
            self.task.resume(self._begin_message, value, error)

    def _begin_message(self, op: Op[Any]) -> Any:
        match op:
            case Alone():
                pass
            case Compute() | Now() | Work():
                return self._begin(op)
            case Send(tensor) | Recv(tensor) | SendReceive(tensor) | Start(Send(tensor) | Recv(tensor)):
                if tensor.device.type == "cpu":
                    return self._begin(op)
        self.waits_for = Postponed(self.world, op)
        return WAITING

    def note(self, event: Event) -> None:
        """Keep a line for the trace until the program waits for this strand."""
        self._lines.append(event)
