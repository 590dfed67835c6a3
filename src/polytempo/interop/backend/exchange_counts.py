"""`ExchangeCounts`: counts of a group's collectives, and the time that its program stands still for them.

DDP asks for futures during backward, and waits for them at its end, in C++, where no call of ours sees it:

    backward ── bucket ── bucket ── ┤ end: callback of autograd ── DDP waits ──┤ last collective is done
    wait_s                          └──────────── counted here ────────────────┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Awaited(Protocol):
    """A collective that a future stands for."""

    @property
    def done(self) -> bool:
        """True once it is done."""


class ExchangeCounts:
    """Counts since its making. `exchange_s` is written by the thread that runs a collective, one at a time."""

    def __init__(self) -> None:
        self.exchanges = 0
        self.num_bytes = 0
        """Bytes of this rank's tensors in them."""
        self.exchange_s = 0.0
        """Seconds of the collectives: moving, adding, and waiting for ranks that come later."""
        self.wait_s = 0.0
        """Seconds that the program stood still for them."""
        self._task: int | None = None
        self._last: Awaited | None = None
        self._since_s: float | None = None

    def count(self, num_bytes: int) -> None:
        """Count a collective with `num_bytes` of this rank's tensors."""
        self.exchanges += 1
        self.num_bytes += num_bytes

    def timed(self, run: Callable[..., T], *arguments: Any) -> T:
        """Run a collective."""
        began_s = time.perf_counter()
        try:
            return run(*arguments)
        finally:
            self.exchange_s += time.perf_counter() - began_s

    @contextmanager
    def standing(self) -> Iterator[None]:
        """The program stands still inside."""
        since_s = self.stand()
        try:
            yield
        finally:
            self.stood(since_s)

    def stand(self) -> float:
        """The program stands still from now on, or has since backward's end: the moment, for `stood`."""
        since_s, self._since_s = self._since_s, None
        return time.perf_counter() if since_s is None else since_s

    def stood(self, since_s: float) -> None:
        """The program goes on."""
        self.wait_s += time.perf_counter() - since_s

    def awaited(self, work: Awaited, lock: threading.Lock) -> None:
        """Take note that the program asked for a future of `work`, under `lock`; in backward it waits at its end."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        self._last = work
        if task != self._task:
            self._task = task
            engine: Any = torch.autograd.Variable._execution_engine  # before DDP's own callback, which is queued later
            engine.queue_callback(lambda: self._backward_ended(lock))

    def _backward_ended(self, lock: threading.Lock) -> None:
        with lock:
            if self._last is not None and not self._last.done:
                self._since_s = time.perf_counter()

    def arrived(self, work: Awaited) -> None:
        """Take note that `work` is done, under the lock of `awaited`."""
        if work is self._last:
            self._last = None
            if self._since_s is not None:
                self.wait_s += time.perf_counter() - self._since_s
                self._since_s = None
