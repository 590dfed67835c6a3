"""`LineFile`: a file of a run's folder that grows by lines, and `GrownObject`: the same where whole objects are put."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath

_LAST_TRIES = 3


class LineFile:
    """A new file that begins with `content`; each `write` appends a line, whole or not at all. Threads may write.

        lines = LineFile(folder / "events.jsonl")
        lines.write(b'{"kind": "finish"}\\n')

    A run goes on without a line that cannot be written, on a full disk for example: the first such error is a note on
    standard error, and later lines are tried. Errors: OSError if the file cannot be made. Cost: one write a line; at a
    URL a thread puts the whole object, at most every `every_s`.
    """

    def __init__(self, path: Place, content: bytes = b"", *, every_s: float = 10.0) -> None:
        self._path = path
        self._noted = self._closed = False
        self._lock = threading.Lock()
        self._append: Callable[[bytes], object]
        if isinstance(path, UrlPath):
            grown = GrownObject(path, content, every_s=every_s)
            self._append, self._close = grown.write, grown.close
            return
        files.replace(path, content)
        stream = files.append(path)
        self._append, self._close = partial(_append_whole, stream, path), stream.close

    def write(self, line: bytes) -> None:
        """Append a line; after `close` it is left out."""
        with self._lock:
            if not self._closed:
                self._try(lambda: self._append(line))

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._try(self._close)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if not self._noted:
                self._noted = True
                said = f"{self._path} lacks lines that could not be written: {files.problem(error, self._path)}"
                with suppress(OSError):  # the log may be on the same disk
                    print(f"note: {said}; the run goes on", file=sys.stderr, flush=True)


def _append_whole(stream: BinaryIO, path: Path, line: bytes) -> None:
    size = os.fstat(stream.fileno()).st_size
    try:
        files.write(stream, line, path)
    except OSError:
        with suppress(OSError):
            os.ftruncate(stream.fileno(), size)  # the next line must not continue half of this one
        raise


class GrownObject:
    """An object that grows. A thread puts appended bytes at most every `every_s`, and all of them at the end.

    A process that is killed loses at most the rows of that time. A put that fails is tried again with the
    next one; only the last one's error is raised, by `close`.
    """

    def __init__(self, path: UrlPath, content: bytes = b"", *, every_s: float = 10.0) -> None:
        self._path, self._every_s = path, every_s
        self._content, self._changed = bytearray(content), True
        self._lock, self._over = threading.Lock(), threading.Event()
        self._put()
        self._thread = threading.Thread(target=self._work, name="polytempo-metrics", daemon=True)
        self._thread.start()

    def write(self, content: bytes) -> None:
        """Append; this never waits for the filesystem."""
        with self._lock:
            self._content += content
            self._changed = True

    def close(self) -> None:
        """Put the rest. OSError if that cannot be done."""
        self._over.set()
        self._thread.join()
        for number in range(1, _LAST_TRIES + 1):
            try:
                return self._put()
            except OSError:
                if number == _LAST_TRIES:
                    raise

    def _work(self) -> None:
        while not self._over.wait(self._every_s):
            with suppress(OSError):
                self._put()

    def _put(self) -> None:
        with self._lock:
            content, changed, self._changed = bytes(self._content), self._changed, False
        if not changed:
            return
        try:
            self._path.write(content)
        except OSError:
            self._changed = True
            raise
