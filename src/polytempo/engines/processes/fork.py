"""Forking: a child process that shares the launcher's memory and none of its endings."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

# macOS has no prctl: there the janitor alone ends the workers of a launcher that was killed.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1

_STANDARD_ERROR = 2
_POLL_S = 0.02
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IGNORED = ("ignore", re.compile(r".*use of fork\(\) may lead to"), DeprecationWarning, None, 0)


def reserve_standard_files() -> None:
    """Open the null device in place of closed standard files (input, output, error), as `<&-` leaves them.

    Else the next file, pipe or socket gets descriptor 0, 1 or 2, and a child that redirects its standard files
    overwrites it, and a note on standard error is an exception. Call it first in a program, and before a fork.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):  # None: Python found it closed
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for good


def fork(child: Callable[[], None]) -> int:
    """Run `child` in a new process and return its process id.

    The new process begins with the ending signals held back (see `held_signals`), and ends with
    `child`: no exit handler, `finally` or test runner of this process runs in it. Its garbage collector leaves
    this process's objects alone: their end may wait for threads, and a fork has none of these.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # another thread has closed it, or it is the caller's and has none
            stream.flush()
    with held_signals():
        process = _fork()
        if process == 0:
            gc.freeze()
            try:
                child()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
    return process


def _fork() -> int:
    with _without_warning(), _outside_of_hooks(), _named_limit():
        return os.fork()


@contextmanager
def _outside_of_hooks() -> Iterator[None]:
    """Signals that come while Python's hooks of a fork run wait for the end of `held_signals`.

    The mask is this thread's. Another thread may take the signal, and the exception of its handler would be lost:
    Python prints and ignores exceptions of such hooks.
    """
    noted: list[int] = []
    here = os.getpid()
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        taken = [number for number in _ENDING if callable(signal.getsignal(number))]
        handlers = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in taken}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if os.getpid() == here:
            for each in noted:
                signal.raise_signal(each)


@contextmanager
def _without_warning() -> Iterator[None]:
    """Python 3.12 warns wherever threads run; `local.launch` looks at them itself.

    `warnings.catch_warnings` would put back the list that it found, and with two threads a filter would stay, or go.
    """
    filters = warnings.filters
    filters.insert(0, _IGNORED)  # type: ignore[attr-defined] # it is a list
    try:
        yield
    finally:
        for each in [filters] if filters is warnings.filters else [filters, warnings.filters]:  # of another thread
            with suppress(ValueError):
                each.remove(_IGNORED)  # type: ignore[attr-defined]


@contextmanager
def _named_limit() -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise OSError(
            error.errno,
            "no further process can start here: the limit of processes and threads is reached (ulimit -u, or pids.max "
            "of the control group); raise it, or use fewer workers",
        ) from error


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold Ctrl-C and its like back for a moment, so that no process is started and then forgotten."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def collected_children() -> Iterator[None]:
    """While this lasts, SIGCHLD is not ignored, as some parents hand it on: how children end would be lost.

    In another thread than the main one nothing changes: Python sets no signals there.
    """
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        yield


def sleep_until_ended(processes: Iterable[int], timeout_s: float) -> None:
    """Sleep until one of `processes`, children that were not waited for, has ended, at most `timeout_s`."""
    ended = select.poll()
    with ExitStack() as descriptors:
        try:
            for process in processes:
                descriptor = os.pidfd_open(process)
                descriptors.callback(os.close, descriptor)
                ended.register(descriptor, select.POLLIN)
        except (AttributeError, OSError):  # macOS and some sandboxes have no pidfd: look again soon
            time.sleep(min(timeout_s, _POLL_S))
        else:
            ended.poll(None if timeout_s == float("inf") else 1000 * timeout_s)


def open_program(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """`subprocess.Popen` inside `held_signals`: the program does not inherit the mask, so SIGTERM ends it."""
    with _without_warning(), _outside_of_hooks(), _named_limit():
        return subprocess.Popen(words, preexec_fn=_let_signals_through, **options)  # noqa: S603 - the caller's words


def _let_signals_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def default_signals() -> None:
    """Forget the Python handlers that were inherited, let held signals through, and collect children."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def ignore_ending_signals() -> None:
    """Outlive Ctrl-C and its like."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, however that happens.

    The kernel does so at the end of the parent's thread that has started it: it must last as long as the process.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)
