"""`Background`: jobs in one thread, one after the other in the order in which they were given."""

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
        """Have it done, after all that was given before."""
        self._jobs.put(job)

    def close(self) -> None:
        """Let the thread end after what was given, and wait for that."""
        self._jobs.put(None)
        ended(self._thread)


def _work_off(jobs: SimpleQueue[Job | None], last: Job) -> None:
    """Knows the queue only, so that the thread keeps nothing alive that it does not work for."""
    while (job := jobs.get()) is not None:
        job()
        del job
    last()
