"""`Courier`: messages under way, as torch's `Work`, and a thread for those that no caller waits for."""

from __future__ import annotations

import threading
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import Work

from polytempo.native.group import Group
from polytempo.native.transfer import Transfer
from polytempo.worlds.threads import close_at_exit, ended

_GRACE_S = 0.002
"""How long a message may wait for someone to wait for it before a thread sees to it."""


class Courier:
    """Finishes messages that no caller waits for yet: a thread, made when there is one."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.num_waiting = 0
        self._news = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, transfer: Transfer, back: Tensor | None, timeout: timedelta) -> Work:
        """The message as a `Work`; `back` gets a copy of what is received."""
        work = PendingMessage(self, transfer, back, timeout)
        if transfer.done():
            work.exception()  # kept until someone waits for it
            return work
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="polytempo-messages", daemon=True)
            self._thread.start()
            close_at_exit(self)
        self._news.set()
        return work

    def close(self) -> None:
        """Let the thread end, and wait for that."""
        self._closed = True
        self._news.set()
        ended(self._thread)

    def _serve(self) -> None:
        pending = 0
        while not self._closed:
            if not pending:
                self._news.wait()
            self._news.clear()
            threading.Event().wait(_GRACE_S)
            pending = 1 if self.num_waiting else self.group.advance_transfers(0.1)


class PendingMessage(Work):
    """A message under way."""

    def __init__(self, courier: Courier, transfer: Transfer, back: Tensor | None, timeout: timedelta) -> None:
        super().__init__()
        self._courier, self._transfer, self._back, self._timeout = courier, transfer, back, timeout
        self._finished = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is sent, or here. Errors: PeerLost, TimedOut, Mismatch."""
        if not self._finished:
            limit_s = timeout.total_seconds() if timeout is not None else 0.0
            self._courier.num_waiting += 1
            try:
                self._transfer.wait(limit_s if limit_s > 0 else self._timeout.total_seconds())
            except Exception as error:
                self._error = error
            finally:
                self._courier.num_waiting -= 1
            if self._back is not None and self._error is None:
                self._back.copy_(self._transfer.tensor)
            self._finished = True
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._finished or self._transfer.done()

    def is_success(self) -> bool:
        """Whether it is done and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong."""
        if self.is_completed() and not self._finished:
            try:
                self.wait()
            except Exception as error:
                return error
        return self._error

    def _source_rank(self) -> int:
        return self._transfer.peer

    source_rank = _source_rank
