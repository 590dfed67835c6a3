"""`Lane`: a group's collectives, one after the other, in the order of their issue. `Courier`: its messages.

A collective waits for the other ranks, while its caller may go on computing. So:

    blocking                       in the caller, after what was issued before
    async, all others are there    in the caller: it takes no longer than the work itself
    async, otherwise               queued; a thread takes it, or the first caller that waits
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from polytempo.interop.backend.exchange_counts import ExchangeCounts
from polytempo.native.group import Group, Transfer
from polytempo.worlds.process.threads import close_at_exit, ended

Run = Callable[[], None]

_thread = threading.local()
"""`announces`: True while this thread calls the callbacks of a future."""


class Waited(Work):
    """Work that is defined by `wait`, `is_completed` and `exception`."""

    def synchronize(self) -> None:
        """Like `wait`."""
        self.wait()

    def is_success(self) -> bool:
        """True once it is done and went well."""
        return self.is_completed() and self.exception() is None


class Finished(Waited):
    """Something that is done."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """The work is done."""
        return True

    def exception(self) -> None:
        """There was none: errors are raised at the issue."""

    def result(self) -> Any:
        """The tensors."""
        return self._result

    def get_future(self) -> Future[Any]:
        """A future that has the tensors."""
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


DONE = Finished(None)
"""The answer of a blocking collective with tensors that no caller reads."""


class Queued(Waited):
    """Something that a lane has still to do, or is doing."""

    def __init__(self, lane: Lane, run: Run, result: Any) -> None:
        super().__init__()
        self._lane, self._run, self._result = lane, run, result
        self._done = False
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None

    def perform(self) -> None:
        """Do it. Called once, by the thread that holds the lane, which then lets it go and calls `announce`.

        An error that is not an Exception (Ctrl-C) is raised here as well. The call counts as made: the other ranks have
        made it.
        """
        try:
            self._run()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            with self._lane.futures:
                self._done = True
                if self._lane.tally is not None:
                    self._lane.tally.arrived(self)

    def announce(self) -> None:
        """Call the callbacks of the future. That may issue further collectives."""
        if self._future is not None:
            before, _thread.announces = getattr(_thread, "announces", False), True
            try:
                self._future.set_result(None)
            finally:
                _thread.announces = before

    def wait(self, timeout: Any = None) -> bool:
        """Wait until it is done; raises the work's error. Each collective has its own deadline."""
        if not self._done:
            self._lane.work_off(until=self)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """True once it is done, well or not."""
        return self._done

    def exception(self) -> BaseException | None:
        """The error, if it failed."""
        return self._error

    def result(self) -> Any:
        """The tensors, once it is done."""
        self.wait()
        return self._result

    def get_future(self) -> Future[Any]:
        """A future that gets the tensors, or the error."""
        if getattr(_thread, "announces", False) and not self._done:
            self._lane.work_off(until=self)  # a wait for it here would keep this thread, perhaps the only one, waiting
        if self._done and self._error is None:
            return Finished(self._result).get_future()
        with self._lane.futures:
            if not self._done:
                self._future = self._future or Future()
                if self._lane.tally is not None:
                    self._lane.tally.awaited(self, self._lane.futures)
        first: Future[Any] = self._future or Future()
        if self._future is None:
            first.set_result(None)
        return first.then(self._answer)  # an error raised in `then` is one for C++, too

    def _answer(self, _: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def done(self) -> bool:
        """True once it is done."""
        return self._done


class Lane:
    """The order of one group's collectives. `ready()` tells whether all ranks' programs have come to the next one."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._queue: deque[Queued] = deque()
        self._running = threading.Lock()
        self.futures = threading.Lock()
        self._news = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.tally: ExchangeCounts | None = None
        """Counts the collectives, where someone reads the counts."""

    def issue(self, run: Run, result: Any, *, blocking: bool) -> Work:
        """Run, now or later, in the order of issue."""
        if blocking:
            performed: list[Queued] = []
            try:
                with self._standing(), self._running:
                    self._empty(performed)
                    run()
            finally:
                _announce(performed)
            return Finished(result)
        queued = Queued(self, run, result)
        if not self._queue and self._running.acquire(blocking=False):
            try:
                if not self._queue and self._ready():  # nothing else runs, so the group is between two calls
                    with self._standing():
                        queued.perform()
            finally:
                self._running.release()
        if not queued.done:
            self._queue.append(queued)
            self._call_thread()
        return queued

    def at_once(self, call: Callable[..., int], *arguments: Any) -> int:
        """Call `call(*arguments)` after the earlier work; nothing is built for it, for short collectives."""
        if self._queue:
            self.work_off(self._queue[-1])
        if (tally := self.tally) is not None:
            since_s = tally.stand()
            try:
                with self._running:
                    return tally.timed(call, *arguments)
            finally:
                tally.stood(since_s)
        with self._running:
            return call(*arguments)

    def work_off(self, until: Queued) -> None:
        """Perform the queue, in order, until `until` is done."""
        performed: list[Queued] = []
        try:
            with self._standing(), self._running:
                while not until.done:
                    self._perform_first(performed)
        finally:
            _announce(performed)

    def close(self) -> None:
        """Let the thread end once the queue is empty, and wait for that."""
        self._closed = True
        self._news.set()
        ended(self._thread)

    def _standing(self) -> AbstractContextManager[None]:
        """The program stands still inside."""
        return nullcontext() if self.tally is None else self.tally.standing()

    def _empty(self, performed: list[Queued]) -> None:
        while self._queue:
            self._perform_first(performed)

    def _perform_first(self, performed: list[Queued]) -> None:
        first = self._queue[0]  # it stays there until it is done, for Ctrl-C may come between any two lines
        try:
            if not first.done:
                performed.append(first)
                first.perform()
        finally:
            if first.done:
                self._queue.popleft()

    def _call_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="polytempo-collectives", daemon=True)
            self._thread.start()
            close_at_exit(self)
        self._news.set()

    def _serve(self) -> None:
        while not self._closed:
            self._news.wait()
            self._news.clear()
            while self._queue:
                performed: list[Queued] = []
                with self._running:
                    if self._queue:
                        self._perform_first(performed)
                _announce(performed)


def _announce(performed: list[Queued]) -> None:
    for queued in performed:
        queued.announce()


_LOOKS_S = 1.0
"""The thread sleeps so long at most before it looks whether it is to end."""


class Courier:
    """Moves messages that are held up while no caller waits for them: in a thread, made with the first unfinished one.

    It sleeps in the native core until another rank asks for this one's part, so it does not take Python's lock from a
    program that computes.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, transfer: Transfer, back: Tensor | None, timeout: timedelta) -> Work:
        """The message as a `Work`; `back` gets a copy of the received tensor."""
        work = PendingMessage(transfer, back, timeout)
        if transfer.done():
            work.exception()  # kept until someone waits for it
        elif self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="polytempo-messages", daemon=True)
            self._thread.start()
            close_at_exit(self)
        return work

    def close(self) -> None:
        """Let the thread end, and wait for that."""
        self._closed = True
        if self._thread is not None:
            self.group.wake_server()
        ended(self._thread)

    def _serve(self) -> None:
        while not self._closed:
            self.group.serve_transfers(_LOOKS_S)


class PendingMessage(Waited):
    """A message under way."""

    def __init__(self, transfer: Transfer, back: Tensor | None, timeout: timedelta) -> None:
        super().__init__()
        self._transfer, self._back, self._timeout = transfer, back, timeout
        self._finished = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is sent, or here. Errors: PeerLost, TimedOut, Mismatch."""
        if not self._finished:
            limit_s = timeout.total_seconds() if timeout is not None else 0.0
            try:
                self._transfer.wait(limit_s if limit_s > 0 else self._timeout.total_seconds())
            except Exception as error:
                self._error = error
            if self._back is not None and self._error is None:
                self._back.copy_(self._transfer.tensor)
            self._finished = True
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """True once it is done."""
        return self._finished or self._transfer.done()

    def exception(self) -> Exception | None:
        """The error, if it failed."""
        if self.is_completed() and not self._finished:
            try:
                self.wait()
            except Exception as error:
                return error
        return self._error

    def _source_rank(self) -> int:
        return self._transfer.peer

    source_rank = _source_rank
