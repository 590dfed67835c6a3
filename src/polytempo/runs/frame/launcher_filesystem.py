"""`polytempo://run`: the run's folder on the launcher's host, as a filesystem of fsspec in another host's process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import IO, Any, Protocol

import fsspec
from fsspec.spec import AbstractFileSystem
from msgspec import structs

from polytempo.core.system.folder_lock import bears
from polytempo.core.system.url_path import UrlPath
from polytempo.runs.frame.launcher_files import PART_BYTES, FileAnswer, FileRequest
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.start import START
from polytempo.wire.channel import ChannelClient
from polytempo.wire.keys import Keys

URL = "polytempo://run"
_AGAIN_S, _DEADLINE_S = 5.0, 60.0
_uploads = count(1)


class Asks(Protocol):
    """Passes a request to the launcher, and waits for its answer."""

    def ask(self, request: FileRequest) -> FileAnswer:
        """The answer. OSError without an answer, or for an answer with an error."""


def checked(answer: FileAnswer, name: str) -> FileAnswer:
    """The answer, or its OSError."""
    if answer.error:
        raise OSError(answer.error, answer.reason, f"{URL}/{name}")
    return answer


class FileClient:
    """Asks over the encrypted channel. Threads may share it; one request is under way at a time."""

    def __init__(self, address: str, keys: Keys) -> None:
        self._channel = ChannelClient[FileAnswer, FileRequest](address, keys, FileAnswer)
        self._lock, self._number = threading.Lock(), 0

    def ask(self, request: FileRequest) -> FileAnswer:
        """See `Asks`. A request without an answer is sent again after five seconds, for a minute."""
        with self._lock:
            self._number += 1
            numbered = structs.replace(request, number=self._number)
            until_s = time.monotonic() + _DEADLINE_S
            while time.monotonic() < until_s:
                self._channel.send(numbered)
                again_s = time.monotonic() + _AGAIN_S
                while (left_s := again_s - time.monotonic()) > 0:
                    answer = self._channel.take(left_s)
                    if answer is not None and answer.number == self._number:
                        return checked(answer, request.name)
        raise TimeoutError(f"{URL}/{request.name}: the run's launcher did not answer for {_DEADLINE_S:g} s")

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class LauncherFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """See fsspec. `asks` is set once in a process."""

    protocol = "polytempo"
    cachable = False
    asks: Asks | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix(URL).strip("/")

    def _ask(self, verb: str, path: str, **more: Any) -> FileAnswer:
        assert LauncherFileSystem.asks is not None, "no launcher is known here"
        return LauncherFileSystem.asks.ask(FileRequest(0, verb, self._strip_protocol(path), **more))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """See fsspec."""
        found = self._ask("info", path)
        name = self._strip_protocol(path)
        return {"name": name, "size": found.size, "type": "directory" if found.is_folder else "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """See fsspec."""
        folder = self._strip_protocol(path)
        entries = [
            {"name": f"{folder}/{name}".strip("/"), "size": size, "type": "directory" if is_folder else "file"}
            for name, size, is_folder in self._ask("list", path).entries
        ]
        return entries if detail else [entry["name"] for entry in entries]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """See fsspec."""
        content, offset = bytearray(), start or 0
        while end is None or offset < end:
            part = self._ask("get", path, offset=offset).content
            if not part:
                break
            content += part
            offset += len(part)
        return bytes(content if end is None else content[: end - (start or 0)])

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """See fsspec."""
        self._put(path, BytesIO(value), len(value))

    def put_file(self, lpath: str, rpath: str, *_: Any, **__: Any) -> None:
        """See fsspec."""
        with open(lpath, "rb") as stream:
            self._put(rpath, stream, os.path.getsize(lpath))

    def _put(self, path: str, stream: IO[bytes], size: int) -> None:
        upload = next(_uploads)
        for offset in range(0, max(1, size), PART_BYTES):
            last = offset + PART_BYTES >= size
            self._ask("put", path, offset=offset, content=stream.read(PART_BYTES), last=last, upload=upload)

    def get_file(self, rpath: str, lpath: str, *_: Any, **__: Any) -> None:
        """See fsspec."""
        offset = 0
        with open(lpath, "wb") as stream:
            while part := self._ask("get", rpath, offset=offset).content:
                stream.write(part)
                offset += len(part)

    def rm(self, path: str, recursive: bool = False, **_: Any) -> None:
        """See fsspec."""
        self._ask("remove", path)


def with_launcher_files(spec: RunSpec, setting: Mapping[str, Any]) -> RunSpec:
    """The run with a URL as its folder, if this host does not see the launcher's folder."""
    given, out = setting.get("files"), spec.options.out
    if given is None or not isinstance(out, Path) or bears(out, given["mark"]):
        return spec
    LauncherFileSystem.asks = FileClient(given["address"], Keys.from_plain(given["keys"]))
    fsspec.register_implementation(LauncherFileSystem.protocol, LauncherFileSystem, clobber=True)
    start = spec.options.start_from
    if start == str(out / START):
        start = str(UrlPath(URL) / START)
    return replace(spec, options=replace(spec.options, out=UrlPath(URL), start_from=start))
