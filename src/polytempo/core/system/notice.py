"""`Notice`: a signal says that this process has to leave soon, as Slurm, Kubernetes and spot machines do.

SIGTERM ─▶ given: training saves and leaves ─▶ Preempted, exit code 75     a later SIGTERM: it ends immediately
Ctrl-C  ─▶ the same ─▶ Interrupted, exit code 130                          a later Ctrl-C: the same
              └── grace_s later, if it is still there: SIGKILL, because its next writes are lost anyway
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PREEMPTED, INTERRUPTED = 75, 130
"""The exit codes of a process that has saved and left: EX_TEMPFAIL of sysexits.h, "try again later"; and Ctrl-C's."""
_TWICE_S = 1.0
"""A batch system and its programs may both pass on one signal: two of them within this time count as one."""


_LATE_S = 2.0
"""A process that looks may end in order when its time is over; then it is ended."""


class Preempted(SystemExit):
    """The run was asked to leave: it has saved `step` and can be resumed. Where nothing catches it, the process exits
    with 75.
    """

    exit_code = PREEMPTED
    how = "preempted"

    def __init__(self, step: int, saved: str = "") -> None:
        super().__init__(self.exit_code)
        self.step, self.saved = step, saved

    def __str__(self) -> str:
        saved = f", which is saved in {self.saved}: go on with resume" if self.saved else ""
        return f"{self.how} after step {self.step}{saved}"


class Interrupted(Preempted, KeyboardInterrupt):
    """The same where Ctrl-C asked."""

    exit_code = INTERRUPTED
    how = "interrupted"


class Notice:
    """A request to this process to leave, once it has come."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.given_s: float | None = None
        """Time of the request on the monotonic clock."""
        self.number: int = signal.SIGTERM
        """The signal."""
        self._before: dict[int, signal.Handlers | object] = {}
        self._closed = threading.Event()

    @property
    def given(self) -> bool:
        """True if a signal has come."""
        return self.given_s is not None

    @property
    def expired(self) -> bool:
        """True if the time to save is over."""
        return self.given_s is not None and time.monotonic() > self.given_s + self.grace_s

    def take(self, number: int, frame: FrameType | None) -> None:
        """The handler: the first signal is noted, a later signal has its former effect."""
        now_s = time.monotonic()
        if self.given_s is None:
            self.given_s, self.number = now_s, number
            if number == signal.SIGINT:
                os.write(2, b"\nCtrl-C: saving, then the run ends; a second Ctrl-C ends it at once\n")
            threading.Thread(target=self._end_late, name="polytempo-grace", daemon=True).start()
        elif now_s > self.given_s + _TWICE_S:
            self.end(number, frame)

    def end(self, number: int | None = None, frame: FrameType | None = None) -> None:
        """End as the signal would have ended this process without a notice; None: the first one."""
        number = self.number if number is None else number
        before = self._before.get(number, signal.SIG_DFL)
        if callable(before):
            before(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _end_late(self) -> None:
        if not self._closed.wait(self.grace_s + _LATE_S) and self._before:
            print(f"asked to leave, and not done within {self.grace_s:g} s: this process ends", file=sys.stderr)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, numbers: list[signal.Signals]) -> None:
        """Take these signals where no handler stands, or a handler that ends the process."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler) or getattr(before, "ends", False):
                self._before[number] = before
                signal.signal(number, self.take)
        if (
            self._before and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        ):  # a run's own process: see `ignore_hangup`
            self._before[signal.SIGHUP] = signal.SIG_IGN
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def close(self) -> None:
        """Restore the signals' former handlers."""
        self._closed.set()
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) in (self.take, signal.SIG_DFL):
                signal.signal(number, handler)  # type: ignore[arg-type]  # from getsignal


def ignore_hangup() -> None:
    """Let SIGHUP of an engine end a process that it has started only where SIGTERM does not.

    An engine that stops its processes sends both: a `Notice` would take SIGTERM for a request to save.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def noticed(grace_s: float) -> Iterator[Notice]:
    """Inside, SIGTERM, Ctrl-C, and the signal in `POLYTEMPO_PREEMPT_SIGNAL` are noted; a handler of the program's own
    stays. A `Preempted` after Ctrl-C leaves as `Interrupted`.
    """
    notice = Notice(grace_s)
    notice.watch([*preempting_signals(), signal.SIGINT])
    try:
        yield notice
    except Preempted as error:
        if notice.number == signal.SIGINT:
            raise Interrupted(error.step, error.saved) from error
        raise
    finally:
        notice.close()


def preempting_signals() -> list[signal.Signals]:
    """SIGTERM, and the signal that `POLYTEMPO_PREEMPT_SIGNAL` names, such as SIGUSR1. ValueError for no signal."""
    name = os.environ.get("POLYTEMPO_PREEMPT_SIGNAL", "")
    if not name or "POLYTEMPO_RENDEZVOUS" in os.environ:  # a run's own processes hear of it by SIGTERM
        return [signal.SIGTERM]
    if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"POLYTEMPO_PREEMPT_SIGNAL={name!r} names no signal that can be caught; try SIGUSR1")
    return [signal.SIGTERM, signal.Signals[name]]
