"""`GrownObject`: what grows row by row, in a filesystem that takes whole objects only: it is put again now and then."""

from __future__ import annotations

import threading
from contextlib import suppress

from polytempo.core.system.url_path import UrlPath

_LAST_TRIES = 3


class GrownObject:
    """What was appended is put by a thread, at most every `every_s`, and all of it at the end.

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
        """Put what has not been put yet. OSError where that cannot be done."""
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
