"""The janitor: a small process that cleans up after a run, even where the launcher is killed."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import select
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polytempo.core.system.files import made
from polytempo.engines.processes.fork import (
    collected_children,
    fork,
    ignore_ending_signals,
    reserve_standard_files,
    sleep_until_ended,
)

_PATIENCE_S = 5.0
_PAUSE_S = 0.05
_LOOK_S = 1.0
_END_S = 10.0
"""The janitor may take so long to end. It has `_PATIENCE_S` for the folder."""
_OWNER = "owner"
_HOME = re.compile(r"polytempo-[0-9a-f]{8}")


@contextmanager
def swept(home: Path, starter: int | None = None) -> Iterator[int]:
    """Make the private folder `home`; afterwards no process group that was noted, nor the folder, is left.

        launcher ──┐ "-pid"  this group is gone;  "."  the run is over
                   ├──────▶ pipe ──▶ janitor: at "." or the pipe's end, kills the groups, removes the folder
        worker   ──┘ "+pid"  I lead this group

    Yields the pipe's write end. A worker closes its copy after its note, so that the pipe ends when the launcher dies.
    The janitor exists before the folder does: a launcher that is killed at any moment leaves no folder behind. Where
    both are killed, the next run of this user removes the folder. With `starter`, the launcher's parent, a launcher
    that a signal has stopped is killed once its parent is gone: an agent cannot see that.
    """
    reserve_standard_files()
    with collected_children():
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)  # a janitor that is stopped does not read
        janitor = fork(lambda: _watch(read_end, home, starter))
        os.close(read_end)
        owner = -1
        try:
            _sweep(home.parent)
            home.mkdir(mode=0o700)
            owner = _owned(home)
            yield write_end
        finally:
            if owner >= 0:
                os.close(owner)
            _note(write_end, b".\n")
            os.close(write_end)
            _await_end(janitor)
            shutil.rmtree(home, ignore_errors=True)  # only where the janitor was killed


def new_home() -> Path:
    """The path of a private folder that does not exist yet. It is short, because sockets are in it."""
    return Path(tempfile.gettempdir()).absolute() / f"polytempo-{secrets.token_hex(4)}"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new temporary folder, which ends with the block, even if this process is killed."""
    with swept(home := new_home()):
        yield home


@contextmanager
def engine_home(logs: Path | None) -> Iterator[tuple[Path, int, Path]]:
    """An engine's private folder, the pipe to its janitor, and the folder of its logs: `logs`, or a private one."""
    with swept(home := new_home()) as notes:
        logs = (home / "logs" if logs is None else logs).absolute()
        made(logs)
        yield home, notes, logs


def _await_end(janitor: int) -> None:
    """Wait for the janitor's end, for some seconds. A janitor that a signal has stopped goes on; a late one is
    killed."""
    with suppress(ChildProcessError, ProcessLookupError):  # the caller's own handler of SIGCHLD has collected it
        for number in (signal.SIGCONT, signal.SIGKILL):
            os.kill(janitor, number)
            until_s = time.monotonic() + _END_S
            while (left_s := until_s - time.monotonic()) > 0:
                if os.waitpid(janitor, os.WNOHANG)[0]:
                    return
                sleep_until_ended([janitor], left_s)


def begin(notes: int) -> None:
    """Called by a worker that leads its own process group: put it under the janitor's care."""
    _note(notes, b"+%d\n" % os.getpid())
    os.close(notes)


def gone(notes: int, group: int) -> None:
    """Called by the launcher when nothing of `group` is left: its number may soon be another's."""
    _note(notes, b"-%d\n" % group)


def _owned(home: Path) -> int:
    """A file that is locked as long as the launcher or a worker lives: they inherit the lock."""
    owner = os.open(home / _OWNER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks: then nothing is swept
        fcntl.flock(owner, fcntl.LOCK_EX)
        os.write(owner, b"locked while this run lives\n")
    return owner


def _sweep(parent: Path) -> None:
    """Remove the folders of this user's runs in `parent` that lost launcher and janitor together."""
    with suppress(OSError):
        for name in os.listdir(parent):
            if _HOME.fullmatch(name):
                with suppress(OSError):
                    if _is_left(parent / name):
                        shutil.rmtree(parent / name, ignore_errors=True)


def _is_left(home: Path) -> bool:
    """True for a run's folder that is not a link, belongs to this user, and has no living process. OSError means no."""
    status = home.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    owner = os.open(home / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(owner).st_size > 0  # it is written once it is locked
    finally:
        os.close(owner)


def _note(notes: int, line: bytes) -> None:
    # The janitor was killed, or is stopped and the pipe is full: the launcher still cleans up itself.
    with suppress(BrokenPipeError, BlockingIOError):
        os.write(notes, line)


def _watch(notes: int, home: Path, starter: int | None) -> None:
    launcher = os.getppid()
    os.setsid()
    ignore_ending_signals()
    _keep_only(notes)
    groups: set[int] = set()
    for line in _lines(notes, lambda: starter is not None and _is_abandoned(launcher, starter)):
        (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    if starter is not None and _is_abandoned(launcher, starter):
        with suppress(ProcessLookupError):
            os.kill(launcher, signal.SIGKILL)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    _remove(home)
    os._exit(0)


def _lines(notes: int, is_over: Callable[[], bool]) -> Iterator[bytes]:
    """The notes, until the run is over."""
    news = select.poll()
    news.register(notes, select.POLLIN)
    with os.fdopen(notes, "rb", buffering=0) as stream:
        while not is_over():
            if news.poll(1000 * _LOOK_S):
                line = stream.readline()
                if line in (b"", b".\n"):
                    return
                yield line


def _is_abandoned(launcher: int, starter: int) -> bool:
    """True if a signal has stopped it, and its parent is not the process that started it."""
    with suppress(OSError):
        state, parent = Path(f"/proc/{launcher}/stat").read_text().rpartition(") ")[2].split()[:2]
        return state == "T" and int(parent) != starter
    return False


def _keep_only(descriptor: int) -> None:
    """Close everything else: a janitor must not hold the launcher's pipes and sockets open."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    highest = max(descriptor + 1, min(os.sysconf("SC_OPEN_MAX"), 1 << 20))
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, highest)


def _remove(folder: Path) -> None:
    """Remove `folder`; a process that is just dying may still write into it, so try again for a while."""
    deadline = time.monotonic() + _PATIENCE_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(_PAUSE_S)
