"""`ScratchFolder`: a private temporary folder that is removed even if its process is killed.

made ─▶ locked while its process lives ─▶ closed: removed
             ╰─ SIGKILL: unlocked ─▶ removed when the next process of this user makes one
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Self

from polytempo.core.system.descriptors import open_descriptor

_NAME = re.compile(r"polytempo-scratch-[0-9a-f]{16}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_TRIES = 100


class ScratchFolder:
    """The folder `path` (mode 0700), in the system's temporary folder, until `close` or the process's end.

    A file system without `flock` keeps the folder of a killed process. Errors: OSError if none can be made.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir()).absolute()
        _remove_leftovers(parent)
        self.path, lock = _made(parent)
        self.close = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        """Remove the folder with all that is in it. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _made(parent: Path) -> tuple[Path, int]:
    """A new folder and the descriptor that locks it. Another process may remove a folder that is not locked yet."""
    for _ in range(_MOST_TRIES):
        path = parent / f"polytempo-scratch-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            lock = open_descriptor(path, _FOLDER)
            if _locks(lock) is not False and path.exists():
                return path, lock
            os.close(lock)
    raise OSError(f"{_MOST_TRIES} folders in {parent} were removed as soon as they were made")


def _locks(folder: int) -> bool | None:
    """Lock a folder; False if another process has locked it, None if its file system has no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of this user that no process has locked."""
    for name in filter(_NAME.fullmatch, os.listdir(parent)):
        with suppress(OSError):
            folder = open_descriptor(parent / name, _FOLDER)
            try:
                if os.fstat(folder).st_uid == os.geteuid() and _locks(folder):
                    shutil.rmtree(parent / name, ignore_errors=True)
            finally:
                os.close(folder)


def _remove(path: Path, lock: int, maker: int) -> None:
    if os.getpid() == maker:  # a forked process inherits the object, not the folder
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
