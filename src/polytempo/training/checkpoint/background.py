"""`Background`: jobs in one thread, in the order of their arrival."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from polytempo.worlds.process.threads import close_at_exit, ended

Job = Callable[[], None]
"""Something to do. It must not raise: no caller would hear it."""


class Background:
    """The thread ends when this object is gone or closed, or Python ends; then it calls `last`."""

    def __init__(self, name: str, last: Job) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work_off, args=(self._jobs, last), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)
        close_at_exit(self)

    def do(self, job: Job) -> None:
        """Queue a job behind the others."""
        self._jobs.put(job)

    def close(self) -> None:
        """Let the thread end after the queued jobs, and wait for it."""
        self._jobs.put(None)
        ended(self._thread)


def _work_off(jobs: SimpleQueue[Job | None], last: Job) -> None:
    """Knows the queue only, so that the thread keeps nothing alive that it does not work for."""
    while (job := jobs.get()) is not None:
        job()
        del job
    last()
