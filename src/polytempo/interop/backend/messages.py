"""`Courier`: messages under way, as torch's `Work`, and a thread for messages that no caller waits for."""

from __future__ import annotations

import threading
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import Work

from polytempo.native.group import Group
from polytempo.native.transfer import Transfer
from polytempo.worlds.process.threads import close_at_exit, ended

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


class PendingMessage(Work):
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

    def synchronize(self) -> None:
        """Like `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """True once it is done."""
        return self._finished or self._transfer.done()

    def is_success(self) -> bool:
        """True once it is done and went well."""
        return self.is_completed() and self.exception() is None

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
