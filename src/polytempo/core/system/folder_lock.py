"""`held`: one run at a time writes to a folder, on this host, over NFS or at a URL.

out/.lock-00000001.json     its owner: host, process, since when; and a count that grows every few seconds

A newcomer           finds no lock ─▶ creates it, as only one process can, and is the owner
                     finds a lock  ─▶ its owner lives: `FolderTaken`; its owner is gone: creates lock n + 1, and says so

On one machine an owner lives as long as its lock file is locked by `flock`, which ends with it and with the processes
that it has forked; at a URL, as long as its process is there. From another machine its count is watched: no clocks are
compared. The highest number is the owner. A process that stood still until another one took its folder over ends by
SIGKILL as soon as it sees that, because its writes would harm the other.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from polytempo.core.errors import PolytempoError
from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath

_NAME, _HOST = re.compile(r"\.lock-(\d{8})\.json"), re.compile(r"[\w.:-]{1,255}")
_MOST_BYTES, _MOST_TRIES = 4096, 100
_LOOK_S = 0.5
_AT_FORK = threading.Lock()
"""Held while a lock is read or written, so that no process is forked in the midst of that."""
os.register_at_fork(before=_AT_FORK.acquire, after_in_parent=_AT_FORK.release, after_in_child=_AT_FORK.release)


class FolderTaken(PolytempoError):
    """Another run writes to the folder: process `pid` on `host`, since `since_s` (seconds since 1970)."""

    def __init__(self, folder: Place, owner: Owner) -> None:
        self.folder, self.host, self.pid, self.since_s = folder, owner.host, owner.pid, owner.since_s
        super().__init__(
            f"{folder} is in use by another run: {_named(owner)}; wait until that has ended, or name another folder"
        )


@dataclass(frozen=True)
class Heartbeat:
    """The period of an owner's count, and the time without a new count that means that it is gone."""

    beat_s: float
    stale_s: float


NEAR, FAR = Heartbeat(5.0, 30.0), Heartbeat(15.0, 90.0)
"""The heartbeats in a folder, and at a URL."""


class Owner(msgspec.Struct, frozen=True):
    """The holder of a folder, as its lock says."""

    host: str
    machine: str
    """Equal where two processes see each other."""
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    since_s: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    token: str
    """No other owner has it."""
    beats: int = 0


_UNKNOWN = Owner("", "", 0, 0.0, "")


@contextmanager
def held(out: Place | None, heartbeat: Heartbeat | None = None) -> Iterator[Lock | None]:
    """Inside, this process is the owner of the folder `out`, which exists. None: nothing is held.

    Errors: `FolderTaken` where another one is. The lock of an owner that is gone is taken over, with a note on
    standard error; from another machine this takes `heartbeat.stale_s` without a new count.
    Cost: a file of 300 bytes is written every 5 s, or an object every 15 s.
    """
    if out is None:
        yield None
        return
    lock = Lock(out, heartbeat or (FAR if isinstance(out, UrlPath) else NEAR))
    lock.acquire()
    try:
        yield lock
    finally:
        lock.release()


def is_lock(name: str) -> bool:
    """True if a file of this name in a run's folder is a lock."""
    return _NAME.fullmatch(name) is not None


def mark_of(out: Path) -> str:
    """A text for `bears`, to recognise this folder on another host while it is held; "" where it is not."""
    for name in sorted(filter(is_lock, os.listdir(out)), reverse=True):
        if (owner := _parsed(files.read(out / name, _MOST_BYTES))) is not None:
            return f"{name}:{owner.token}"
    return ""


def bears(out: Path, mark: str) -> bool:
    """True if `out`, as this host sees it, is the folder that had the mark."""
    name, _, token = mark.partition(":")
    try:
        owner = _parsed(files.read(out / name, _MOST_BYTES)) if is_lock(name) else None
    except OSError:
        return False
    return owner is not None and owner.token == token


def machine_identity() -> str:
    """The running kernel's identity: hosts with one identity share a machine's cores. Else the host's name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


class Lock:
    """One process's lock of one folder. See `held`."""

    def __init__(self, out: Place, heartbeat: Heartbeat) -> None:
        self._out, self._heartbeat = out, heartbeat
        self._me = Owner(socket.gethostname(), _machine(), os.getpid(), time.time(), secrets.token_hex(8))
        self._number, self._file = 0, -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, name="polytempo-lock", daemon=True)

    def acquire(self) -> None:
        """Become the owner. Listings of a store may lag: a lock counts as it is read, and need not be listed."""
        seen: set[int] = set()
        for attempt in range(_MOST_TRIES):
            time.sleep(0.0 if attempt < 2 else _LOOK_S / 50)
            seen.update(self._numbers())
            before = self._there(seen)
            gone = self._gone(before[-1]) if before else None
            if before and gone is None:
                continue  # it has let go meanwhile
            self._number = max(seen, default=0) + 1
            seen.add(self._number)
            if not self._created():
                continue  # another process was first, though perhaps its lock is not listed yet
            if self._there({*self._numbers()} - {*before, self._number}):
                self._remove(self._number)
                self._close()
                continue
            for number in before:
                self._remove(number)
            if gone is not None:
                said = f"the run of {_named(gone)} held it, and is gone" if gone.pid else "its lock says nothing"
                self._say(f"is taken over: {said}")
            self._thread.start()
            return
        raise PolytempoError(
            f"{self._out}: in {_MOST_TRIES} tries this run could not make a lock of its own; the locks {_listed(seen)} "
            f"were seen, and {_listed(self._there(seen))} can be read now. Another run begins at the same time, or the "
            "listings of the store are late: begin again in a minute, or name another folder"
        )

    def _there(self, numbers: Iterable[int]) -> list[int]:
        """The numbers of locks that can be read."""
        return [number for number in sorted(numbers) if self._read(number) is not None]

    def rest(self) -> None:
        """Count no more: the folder may be removed."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def release(self) -> None:
        """Be the owner no more."""
        if os.getpid() != self._me.pid:
            return  # a process that the owner has forked
        self.rest()
        with suppress(OSError):
            if self._is_mine(self._read(self._number)):
                self._remove(self._number)
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # ------------------------------------------------------------------ another owner

    def _gone(self, number: int) -> Owner | None:
        """The owner of lock `number`, which is gone; None where it has let go. FolderTaken where it lives."""
        first, until_s, told = self._read(number), time.monotonic() + self._heartbeat.stale_s, False
        while (content := self._read(number)) is not None:
            owner = _parsed(content) or _UNKNOWN
            near = owner.machine == self._me.machine and owner.pid > 0
            locked = None if isinstance(self._out, UrlPath) else _is_locked(self._out / _name(number))
            if near and (locked is False or (locked is None and _has_ended(owner.pid))):
                return owner if self._read(number) is not None else None
            if owner.pid and (content != first or (locked and not (near and _has_ended(owner.pid)))):
                raise FolderTaken(self._out, owner)
            if time.monotonic() >= until_s:
                if locked:  # by processes that it has started, and that go on without it
                    raise FolderTaken(self._out, owner)
                return owner
            if owner.pid and not told and not locked:
                told = True
                wait_s = f"{self._heartbeat.stale_s:g} s"
                print(
                    f"note: {self._out} was held by {_named(owner)}: seeing for {wait_s} if it lives", file=sys.stderr
                )
            time.sleep(min(_LOOK_S, self._heartbeat.stale_s / 4))
        return None

    # ------------------------------------------------------------------ the owner's count

    def _count(self) -> None:
        beats = 0
        while not self._over.wait(self._heartbeat.beat_s):
            with suppress(OSError), _AT_FORK:
                content = self._read(self._number)
                other = content is not None and _parsed(content) is not None and not self._is_mine(content)
                if other or self._numbers()[-1:] > [self._number]:
                    self._end()
                if content is not None:  # else its folder was removed, not by another run
                    beats += 1
                    self._write(msgspec.json.encode(msgspec.structs.replace(self._me, beats=beats)))

    def _end(self) -> None:
        last = self._numbers()[-1:] or [self._number]
        owner = _parsed(self._read(last[0]) or b"") or _UNKNOWN
        self._say(f"was taken over by {_named(owner)} while this run stood still: this run ends")
        os.kill(os.getpid(), signal.SIGKILL)

    def _say(self, what: str) -> None:
        print(f"note: {self._out} {what}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ files and objects

    def _numbers(self) -> list[int]:
        names = self._out.names() if isinstance(self._out, UrlPath) else os.listdir(self._out)
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def _read(self, number: int) -> bytes | None:
        """Lock `number`, and None where it is not there."""
        try:
            return files.read(self._out / _name(number), _MOST_BYTES)
        except FileNotFoundError:
            return None

    def _is_mine(self, content: bytes | None) -> bool:
        owner = None if content is None else _parsed(content)
        return owner is not None and owner.token == self._me.token

    def _created(self) -> bool:
        """Make lock `self._number`; False where another process has made it."""
        path, content = self._out / _name(self._number), msgspec.json.encode(self._me)
        if isinstance(path, UrlPath):
            failure: OSError | None = None
            try:
                path.create(content)
            except OSError as error:  # an answer that was lost looks as if another process had been first
                failure = error
            found = self._read(self._number)
            if found is None and failure is not None:
                raise failure
            return self._is_mine(found)
        with files.named(path):
            try:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except FileExistsError:
                return False
            try:
                _lock(self._file)
                self._write(content)  # last: who reads nothing yet does not take the owner for gone
            except BaseException:  # its disk is full, say: an empty lock that is held would keep this process out
                self._remove(self._number)
                self._close()
                raise
        return True

    def _write(self, content: bytes) -> None:
        if isinstance(self._out, UrlPath):
            (self._out / _name(self._number)).write(content)
        else:
            os.pwrite(self._file, content, 0)  # in place: the file that is locked; it never gets shorter

    def _remove(self, number: int) -> None:
        with suppress(OSError):
            files.remove(self._out / _name(number))


def _machine() -> str:
    """This machine, and the processes of it that are seen from here: two containers on one kernel see their own."""
    with suppress(OSError):
        return f"{machine_identity()} {os.readlink('/proc/self/ns/pid')}"
    return machine_identity()


def _name(number: int) -> str:
    return f".lock-{number:08d}.json"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(_name(number) for number in sorted(numbers)) or "none"


def _named(owner: Owner) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since_s))
    return f"process {owner.pid} on {owner.host}, since {since}" if owner.pid else "another process"


def _parsed(content: bytes) -> Owner | None:
    """The owner that wrote a lock. None for an unfinished lock, and for a file that no run has written."""
    try:
        owner = msgspec.json.decode(content, type=Owner)
    except (ValueError, RecursionError):
        return None
    return owner if _HOST.fullmatch(owner.host) else None


def _lock(file: int) -> None:
    """Take its `flock`. Who comes and looks has it for a moment; where there are no such locks, the count must do."""
    until_s = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(_LOOK_S / 100)
            continue
        except OSError:
            pass
        return


def _is_locked(path: Path) -> bool | None:
    """True if a process has its `flock`; None where that cannot be known."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


def _has_ended(pid: int) -> bool:
    """True if no process of this machine has the number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
