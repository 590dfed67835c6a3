"""Threads that run tasks as soon as earlier tasks that they need are done; the caller's thread is one of them.

Modes of autograd, autocast and the number of threads, which torch keeps for each thread, go with a task.

A thread that waits for the interpreter's lock asks for it only after the switch interval, 5 ms unless it is set; until
then the lock's holder gives it up around each operation of torch and takes it back, often before the other thread has
woken up. Operations of a model are shorter than 5 ms, so branches would run one after the other: `short_intervals`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch

_IDLE_S = 10.0
"""Seconds that a thread waits for work before it ends."""


class PoolWork(NamedTuple):
    """Something that a thread does."""

    call: Callable[[], None]
    needs: Sequence[int]
    """Work that must be done before, as numbers among all work."""
    remaining: float
    """The length of the longest way that begins with it; the longest goes first."""


class Pool:
    """`size` threads, the caller's among them. They start when they are needed, and end when they are idle."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._busy = threading.Lock()
        self._run: _Run | None = None
        self._number = 0
        """The run's number, so that no thread helps one twice."""
        self._threads = 0

    def perform(self, work: Sequence[PoolWork]) -> None:
        """Do all work. Where something fails the rest is not begun; raises the error of the first work that failed.

        Where the threads have other work already, as for another thread's call, this thread does it alone.
        """
        if self._process != os.getpid():  # threads are left behind by a fork
            self._begin_anew()
        shared = self._busy.acquire(blocking=False)
        run = _Run(work, self._changed if shared else threading.Condition(), ThreadSettings.here())
        try:
            if shared:
                with short_intervals():
                    self._offer(run)
                    run.help()
            else:
                run.help()
        except BaseException:  # an interrupt, while others compute
            run.abandon()
            raise
        finally:
            if shared:
                self._run = None
                self._busy.release()
        run.check()

    def _offer(self, run: _Run) -> None:
        with self._changed:
            self._run, self._number = run, self._number + 1
            missing = self.size - 1 - self._threads
            self._threads += missing
            self._changed.notify_all()
        for _ in range(missing):
            threading.Thread(target=self._serve, name="polytempo-branch", daemon=True).start()

    def _is_new(self, done: int) -> bool:
        return self._run is not None and self._number != done

    def _serve(self) -> None:
        done = 0
        while True:
            with self._changed:
                if not self._changed.wait_for(partial(self._is_new, done), _IDLE_S):
                    self._threads -= 1
                    return
                run, done = self._run, self._number
            assert run is not None
            with run.settings.set():
                run.help()
            del run  # with all tensors of its work


class _Run:
    def __init__(self, work: Sequence[PoolWork], changed: threading.Condition, settings: ThreadSettings) -> None:
        self._work, self._changed, self.settings = work, changed, settings
        self._missing = [len(each.needs) for each in work]
        self._users: list[list[int]] = [[] for _ in work]
        for number, each in enumerate(work):
            for need in each.needs:
                self._users[need].append(number)
        self._ready = [(-each.remaining, number) for number, each in enumerate(work) if not each.needs]
        heapify(self._ready)
        self._left, self._running = len(work), 0
        self._failed: list[tuple[int, BaseException]] = []

    def help(self) -> None:
        while (number := self._next()) is not None:
            error: BaseException | None = None
            try:
                self._work[number].call()
            except BaseException as raised:  # it is raised in the caller's thread
                error = raised
            self._finish(number, error)

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._over())
            if self._over() or not self._ready:
                return None
            self._running += 1
            return heappop(self._ready)[1]

    def _over(self) -> bool:
        return not self._left or (bool(self._failed) and not self._running)

    def _finish(self, number: int, error: BaseException | None) -> None:
        with self._changed:
            self._running -= 1
            self._left -= 1
            if error is not None:
                self._failed.append((number, error))
                self._ready.clear()
            for user in self._users[number]:
                self._missing[user] -= 1
                if not self._missing[user] and not self._failed:
                    heappush(self._ready, (-self._work[user].remaining, user))
            self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._ready.clear()
            self._left = 0
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of a failure; if there are several, of the first work."""
        if self._failed:
            raise min(self._failed, key=lambda each: each[0])[1]


INTERVAL_S = 1e-3
"""Roughly the shortest time of an operation that is worth a thread. Each switch costs some microseconds."""

_lock = threading.Lock()
_before: list[float] = []
"""The interval as it was; one for each that has been shortened and not yet set back."""


@contextmanager
def short_intervals() -> Iterator[None]:
    """Let threads switch after at most `INTERVAL_S`. The interval belongs to the process; the last one out sets it
    back."""
    with _lock:
        _before.append(_before[0] if _before else sys.getswitchinterval())
        sys.setswitchinterval(min(INTERVAL_S, _before[0]))
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                sys.setswitchinterval(before)


_DEVICE = "cpu"


class ThreadSettings(NamedTuple):
    """The settings of one thread."""

    threads: int
    """Threads of one operation."""
    gradients: bool
    inference: bool
    autocast: torch.dtype | None
    cached: bool
    """True if autocast keeps a parameter's copy for its further uses."""

    @classmethod
    def here(cls) -> ThreadSettings:
        """The settings of this thread."""
        return cls(
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype(_DEVICE) if torch.is_autocast_enabled(_DEVICE) else None,
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set them here. Autocast's context would drop the copies that all threads share when it ends here."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        before = ThreadSettings.here()
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.gradients):
            self._set_autocast()
            try:
                yield
            finally:
                before._set_autocast()

    def _set_autocast(self) -> None:
        torch.set_autocast_enabled(_DEVICE, self.autocast is not None)
        if self.autocast is not None:
            torch.set_autocast_dtype(_DEVICE, self.autocast)
        torch.set_autocast_cache_enabled(self.cached)


def is_plain() -> bool:
    """True if this thread only computes: no trace, checkpoint or transform follows its operations."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
    )


def is_caching() -> bool:
    """True if autocast keeps a parameter's copy; the copy's gradients are summed before they are converted back."""
    return torch.is_autocast_enabled(_DEVICE) and torch.is_autocast_cache_enabled()
