"""Objects by name, in a folder or in a filesystem of fsspec, with the one operation that decides: a conditional put.

    create(name, content)     of several that create one name exactly one succeeds; the others get FileExistsError

A folder links a finished file to the name, which fails where there is one. S3 takes `If-None-Match: *`, Google and
Azure their own conditions, all by `pipe_file(mode="create")`. `ObjectStore.check_conditional` tries it.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from polytempo.core.system.url_path import UrlPath, filesystem, place

_IN_MEMORY = threading.Lock()
"""fsspec's memory looks first and writes then: threads of a process take turns."""


class Objects(Protocol):
    """A place of objects. Names may have slashes; every operation may raise an OSError or an error of the store."""

    def create(self, name: str, content: bytes) -> None:
        """Put a new object. FileExistsError where there is one."""

    def put(self, name: str, content: bytes) -> None:
        """Put an object, in place of another one."""

    def get(self, name: str) -> bytes:
        """An object's content. FileNotFoundError where there is none."""

    def remove(self, name: str) -> None:
        """Remove an object; nothing where there is none."""


class FolderObjects:
    """Files of a folder that all workers share. The filesystem must have hard links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, name: str, content: bytes) -> None:
        """See `Objects`."""
        aside = self._written(name, content)
        try:
            os.link(aside, self._folder / name)
        finally:
            aside.unlink()

    def put(self, name: str, content: bytes) -> None:
        """See `Objects`."""
        self._written(name, content).replace(self._folder / name)

    def get(self, name: str) -> bytes:
        """See `Objects`."""
        return (self._folder / name).read_bytes()

    def remove(self, name: str) -> None:
        """See `Objects`. The last object of a folder takes the folder along."""
        with suppress(FileNotFoundError):
            (self._folder / name).unlink()
        parent = (self._folder / name).parent
        if parent != self._folder:  # which may be the user's own
            with suppress(OSError):
                parent.rmdir()

    def _written(self, name: str, content: bytes) -> Path:
        """The content in a file of its own beside the name."""
        aside = self._folder / f"{name}.{secrets.token_hex(8)}.aside"
        aside.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_bytes(content)
        except FileNotFoundError:  # another worker has removed the last object, and with it the folder
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(content)
        return aside


class FilesystemObjects:
    """Objects below a URL, by fsspec. Listings are never read.

    An object of S3 is read in one part, by one request: for reads of several parts s3fs asks for the size before, and
    lists names where there is no object.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._options = {"max_concurrency": 1} if url.startswith(("s3://", "s3a://")) else {}
        filesystem(url, **self._options)  # its errors are the argument's

    def _at(self, name: str) -> tuple[Any, str]:
        fs, path = filesystem(f"{self._url}/{name}", **self._options)
        fs.invalidate_cache()  # another worker may have written
        return fs, path

    def create(self, name: str, content: bytes) -> None:
        """See `Objects`."""
        fs, path = self._at(name)
        with _IN_MEMORY:
            fs.pipe_file(path, content, mode="create")

    def put(self, name: str, content: bytes) -> None:
        """See `Objects`."""
        fs, path = self._at(name)
        fs.pipe_file(path, content)

    def get(self, name: str) -> bytes:
        """See `Objects`."""
        fs, path = self._at(name)
        content: bytes = fs.cat_file(path)
        return content

    def remove(self, name: str) -> None:
        """See `Objects`."""
        fs, path = self._at(name)
        with suppress(FileNotFoundError):
            fs.rm_file(path)


def objects_at(url: str | Path | UrlPath) -> Objects:
    """The objects of a folder or URL; nothing is read or written."""
    where = place(url)
    return FilesystemObjects(where.url) if isinstance(where, UrlPath) else FolderObjects(where)
