"""`ProgressThread`: a thread that advances the strands of a rank while its program computes.

    program   launch A ── launch B ── backward ────────── wait A ── wait B ── step
    thread             A: round 2 ── A: round 3 ── B: round 2 ──┘ hands over the strand that the program waits for

Strands advance in the order of their launch, the next one when the one before is over, so that they compute in the same
order as in a program that waits for each in turn. One strand runs at a time, in whichever thread. The thread begins
messages and computations only. Collectives must begin in one order on all ranks, and only the program knows one: at
anything else than a message a strand stands until the program waits for it, and so do the strands launched after it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch

from polytempo.core import Task
from polytempo.device import Autocast
from polytempo.worlds.process.threads import close_at_exit, ended
from polytempo.worlds.trace import Event

_IDLE_S = 1.0
"""A thread that has had nothing to do for so long ends; the next launch makes another one."""


class Launched(Protocol):
    """A strand that the thread advances (`worlds.process.strand.Strand`)."""

    task: Task[Any]
    taken: bool
    """True if the program advances it."""

    @property
    def awaits_message(self) -> bool:
        """True if it stands at something that the thread may wait for."""

    def await_message(self) -> None:
        """Wait for it."""

    def advance_by_messages(self) -> None:
        """Run until it has to wait again."""

    def note(self, event: Event) -> None:
        """Keep a line for the trace."""


class ProgressThread:
    """The strands of one world that are not over, and the thread that advances them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """The thread that runs a launched strand holds its lock."""
        self._launched: deque[ReferenceType[Launched]] = deque()
        self._inside: Launched | None = None
        """The strand that the thread advances, also while it waits for a message."""
        self._thread: threading.Thread | None = None
        self._closed = False
        close_at_exit(self)

    def add(self, strand: Launched) -> None:
        """A strand has been launched and waits for something. The caller holds the lock."""
        self._launched.append(ref(strand))
        if self._thread is None and strand.awaits_message and not self._closed:
            self._thread = threading.Thread(target=self._serve, name="polytempo-progress", daemon=True)
            self._thread.start()
        self.changed.notify_all()

    @contextmanager
    def taken(self, strand: Launched) -> Iterator[None]:
        """The program advances `strand` from now on. Waits for the thread where it is in it."""
        with self.changed:
            strand.taken = True
            while self._inside is strand:
                self.changed.wait()
        try:
            yield
        finally:
            with self.changed:
                self.changed.notify_all()

    def here(self) -> Launched | None:
        """The strand that this call happens in, if that is in the thread."""
        return self._inside if threading.current_thread() is self._thread else None

    def close(self) -> None:
        """Advance nothing any more, and wait for the end of the thread."""
        with self.changed:
            self._closed = True
            thread = self._thread
            self.changed.notify_all()
        ended(thread)

    def _serve(self) -> None:
        while (strand := self._next()) is not None:
            try:
                strand.await_message()
                with self.changed:
                    if not (strand.taken or self._closed):
                        strand.advance_by_messages()
            finally:
                with self.changed:
                    self._inside = None
                    self.changed.notify_all()
            del strand

    def _next(self) -> Launched | None:
        """The strand to advance, once there is one; None: the thread is to end."""
        with self.changed:
            while not self._closed:
                while self._launched and ((first := self._launched[0]()) is None or first.task.done):
                    self._launched.popleft()
                if self._launched and first is not None and first.awaits_message and not first.taken:
                    self._inside = first
                    return first
                first = None
                if not self.changed.wait(_IDLE_S) and not self._launched:
                    break
            self._thread = None
        return None


class Modes:
    """torch's settings of the thread that launched a strand, which other threads do not share."""

    __slots__ = ("_autocast", "_gradients")

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._autocast = Autocast()

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set them here."""
        with (
            torch.set_grad_enabled(self._gradients),
            self._autocast.set(),
        ):
            yield
