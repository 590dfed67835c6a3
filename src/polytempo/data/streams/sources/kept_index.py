"""Facts about data that cost a pass over it, kept in a cache folder from run to run: one small file for each part.

    ~/.cache/polytempo/streams/3f0c….index        msgpack: the whole key, the facts, and their SHA-256
                              /77a1….small        the same of up to 256 small parts, one behind the other
                              /3f0c….lock         held by `flock` while one process counts

The folder is `$POLYTEMPO_CACHE`, or `polytempo/streams` in `$XDG_CACHE_HOME`. It may be removed at any time. Where it
cannot be written, each process counts for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from polytempo.core.system import files
from polytempo.core.system.descriptors import open_descriptor

VERSION = 1
MAX_BYTES = 1 << 32
KEPT_FROM_SAMPLES, KEPT_FROM_BYTES = 10_000, 1 << 20
"""Smaller sources are counted each time, and smaller files share a kept file."""
SMALL_TOGETHER, MOST_SMALL = 256, 1024
"""Small parts in a kept file, and files of them: of more, the oldest half is removed."""
WAIT_S = 3600.0
"""The longest wait for another process that counts; then this one counts, too."""
_LOOK_S = 0.05

Facts = TypeVar("Facts")


class _Kept(msgspec.Struct, frozen=True):
    key: str
    facts: bytes
    digest: bytes


class PartToCount(msgspec.Struct, Generic[Facts]):
    """A part of a source: its key, with the state of its data in it, and the function that counts it."""

    key: str
    count: Callable[[], Facts]
    keep: bool = True
    """False where counting costs less than a file, or a change would not show in the key."""
    small: bool = False
    """True where it costs less than a file of its own."""


def cache_folder() -> Path:
    """The folder of indexes."""
    own = os.environ.get("POLYTEMPO_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "polytempo/streams"


def counted(parts: Sequence[PartToCount[Facts]], kind: type[Facts]) -> list[Facts]:
    """The facts of all parts, from the cache where they are there. Processes that count at the same time share the
    work: each takes the parts that no other process has begun.
    """
    small = [number for number, part in enumerate(parts) if part.keep and part.small]
    groups = [small[begin : begin + SMALL_TOGETHER] for begin in range(0, len(small), SMALL_TOGETHER)]
    together = [_together([parts[number] for number in group]) for group in groups]
    found = dict(zip(small, chain.from_iterable(_counted(together, list[kind], "small")), strict=True))  # type: ignore[valid-type]
    rest = [number for number in range(len(parts)) if number not in found]
    found |= zip(rest, _counted([parts[number] for number in rest], kind, "index"), strict=True)
    return [found[number] for number in range(len(parts))]


def _together(parts: Sequence[PartToCount[Facts]]) -> PartToCount[list[Facts]]:
    return PartToCount("\n\n".join(part.key for part in parts), lambda: [part.count() for part in parts])


def _counted(parts: Sequence[PartToCount[Any]], kind: Any, ending: str) -> list[Any]:
    found: dict[int, Any] = {}
    left = list(range(len(parts)))
    deadline = time.monotonic() + WAIT_S
    while left:
        busy = []
        for number in left:
            part = parts[number]
            facts = _read(part.key, kind, ending) if part.keep else part.count()
            if facts is None:
                with _locked(part.key) as ours:
                    if not ours and time.monotonic() < deadline:
                        busy.append(number)
                        continue
                    facts = _read(part.key, kind, ending)
                    if facts is None:
                        facts = part.count()
                        _write(part.key, facts, ending)
            found[number] = facts
        if len(busy) == len(left):
            time.sleep(_LOOK_S)
        left = busy
    return [found[number] for number in range(len(parts))]


def _place(key: str, ending: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.{ending}"


def _read(key: str, kind: type[Facts], ending: str) -> Facts | None:
    """The kept facts; None where there are none, or the file is damaged or of another key."""
    try:
        kept = msgspec.msgpack.decode(files.read(_place(key, ending), MAX_BYTES), type=_Kept)
        whole = kept.key == f"{VERSION} {key}" and hashlib.sha256(kept.facts).digest() == kept.digest
        return msgspec.msgpack.decode(kept.facts, type=kind) if whole else None
    except (OSError, msgspec.MsgspecError):
        return None


def _write(key: str, facts: object, ending: str) -> None:
    content = msgspec.msgpack.encode(facts)
    kept = _Kept(f"{VERSION} {key}", content, hashlib.sha256(content).digest())
    with suppress(OSError):  # a full or locked disk costs the next run a count
        files.replace(_place(key, ending), msgspec.msgpack.encode(kept))
        small = list(cache_folder().glob("*.small")) if ending == "small" else []
        if len(small) > MOST_SMALL:
            for old in sorted(small, key=lambda path: path.stat().st_mtime)[: MOST_SMALL // 2]:
                old.unlink(missing_ok=True)


@contextmanager
def _locked(key: str) -> Iterator[bool]:
    """True where no other process counts this part. The lock ends with its process."""
    path = _place(key, "lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        yield True
        return
    ours = True
    try:
        with suppress(OSError):  # a filesystem without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                ours = False
        yield ours
    finally:
        if ours:
            path.unlink(missing_ok=True)
        os.close(lock)
