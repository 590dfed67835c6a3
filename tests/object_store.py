"""A filesystem of objects for tests, `bucket://FOLDER/bucket/KEY`: each is a file of FOLDER, so processes share them.

As in an object store there are no folders, an object appears whole, and the names are listed that objects have. It
counts its operations, and from the n-th on it can fail.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem


class Store(AbstractFileSystem):
    """One file an object: its key, quoted, is the file's name. `root` is the first part of a path."""

    protocol = "bucket"
    cachable = False
    fails_at: int | None = None
    """All operations from this one on fail; None: none does."""
    operations = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix("bucket://").strip("/")

    def _operate(self) -> None:
        Store.operations += 1
        if Store.fails_at is not None and Store.operations >= Store.fails_at:
            raise ConnectionError(errno.ECONNRESET, f"operation {Store.operations} fails")

    def _file(self, path: str) -> Path:
        root, _, key = self._strip_protocol(path).partition("/bucket/")
        return Path(root) / quote(key, safe="")

    def _objects(self, path: str) -> dict[str, Path]:
        root, _, key = self._strip_protocol(path).partition("/bucket/")
        found = {unquote(file.name): file for file in Path(root).glob("*") if not file.name.endswith(".tmp")}
        return {f"{root}/bucket/{name}": file for name, file in found.items() if f"{name}/".startswith(f"{key}/")}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self._operate()
        path = self._strip_protocol(path)
        names: dict[str, dict[str, Any]] = {}
        for name, file in self._objects(path).items():
            rest = name.removeprefix(path).strip("/")
            below = path if not rest else f"{path}/{rest.partition('/')[0]}"
            is_file = below == name
            size = file.stat().st_size if is_file else 0
            names[below] = {"name": below, "size": size, "type": "file" if is_file else "directory"}
        if not names:
            raise FileNotFoundError(path)
        return list(names.values()) if detail else list(names)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        file = self._file(path)
        if file.is_file():
            self._operate()
            return {"name": path, "size": file.stat().st_size, "type": "file"}
        self.ls(path)
        return {"name": path, "size": 0, "type": "directory"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._operate()
        try:
            return self._file(path).read_bytes()[start:end]
        except (FileNotFoundError, IsADirectoryError):
            raise FileNotFoundError(path) from None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._operate()
        file = self._file(path)
        aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        aside.write_bytes(value)
        if mode == "create":  # one of several is first, as with If-None-Match
            try:
                os.link(aside, file)
            finally:
                aside.unlink()
        else:
            aside.replace(file)

    def put_file(self, lpath: str, rpath: str, *_: Any, **__: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def get_file(self, rpath: str, lpath: str, *_: Any, **__: Any) -> None:
        Path(lpath).write_bytes(self.cat_file(rpath))

    def rm(self, path: str, recursive: bool = False, **_: Any) -> None:
        for file in self._objects(self._strip_protocol(path)).values():
            self._operate()
            file.unlink()

    def rm_file(self, path: str) -> None:
        self._operate()
        self._file(path).unlink()


fsspec.register_implementation("bucket", Store, clobber=True)


def bucket(folder: Path) -> str:
    """The URL of a store with the files of `folder` as objects."""
    (folder / "objects").mkdir(exist_ok=True)
    return f"bucket://{folder / 'objects'}/bucket/run"
