"""`Strand`: a coroutine of a real rank, from its launch to its end."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from polytempo.core import WAITING, Op, Program, Task
from polytempo.core.op import Alone, Compute, Now, Recv, Send, SendReceive, Start, Work
from polytempo.worlds.process.pending import Pair, PendingOp, Postponed, RankWorld
from polytempo.worlds.process.progress_thread import Modes, ProgressThread
from polytempo.worlds.trace import Event


class Strand:
    """A coroutine under way, or finished. `waits_for`: what it stands at, where it is neither.

    `progress`: what may advance it while the program computes; None: nothing does.
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
        """Whether it is over, as far as the program knows. What a thread has done counts when it is waited for."""
        self.taken = False
        """Whether the program advances it now, so that the thread must not."""
        if progress is None:
            return
        self.modes = Modes()
        self._lines: list[Event] = []
        """What it did in the thread, for the trace."""
        self._awaited: list[Strand] = []
        """What it has waited for in the thread."""

    # ------------------------------------------------------------------ the program

    def wait(self) -> Any:
        """What the coroutine returns, once it has."""
        if self.progress is None:
            self.advance(block=True)
            return self.task.result()
        since_s = self.world.now_s()
        with self.progress.taken(self):
            self.world.waited(since_s)
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
        """What it waits for, once that is finished."""
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
        """Let the waiter know what happened in the thread, as if it had happened now."""
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
        """Whether the thread may go on with what waits for this strand: it is over."""
        return self.task.done

    def arrive(self) -> None:
        """It is over."""

    @property
    def awaits_message(self) -> bool:
        """Whether it stands at something for which the thread may wait."""
        return self.waits_for is not None and self.waits_for.is_message

    def await_message(self) -> None:
        """Wait for what it stands at."""
        assert self.awaits_message
        assert not isinstance(self.waits_for, Postponed | None)
        self.waits_for.arrive()

    def advance_by_messages(self) -> None:
        """Its message has come: run until it waits for the next one, or for what only the program begins."""
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
