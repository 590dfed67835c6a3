"""Files of a run in its launcher's folder, for processes on hosts that do not see that folder.

    process   polytempo://run/checkpoint/…  ──FileRequest──▶  FileServer (a thread of the launcher) ──▶ out/checkpoint/…
              (`launcher_filesystem`)       ◀──FileAnswer──

Names are confined to the run's folder: no "..", no link, nothing absolute. Content travels in parts of bounded size; a
file appears whole, when its last part has come. The channel has CURVE keys of its own; they travel with a process's
order only.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from polytempo.core.system import files
from polytempo.core.system.folder_lock import mark_of
from polytempo.engines.engine import EngineAddress
from polytempo.wire.channel import ChannelServer
from polytempo.wire.keys import make_keys

PART_BYTES = 4 << 20
_MOST_PARTS, _MOST_NAME_BYTES, _MOST_DEPTH = 256, 200, 6
_LOOK_S = 0.1


class FileRequest(Struct, frozen=True):
    """`verb` is list, info, get, put or remove; a repeated request has the same effect as one."""

    number: int
    verb: str
    name: str
    """A path relative to the run's folder, with slashes; "" is the folder."""
    offset: int = 0
    content: bytes = b""
    last: bool = False
    """True if a put completes the file with this part."""
    upload: int = 0
    """The number of a put file, equal in all its parts, and different for each file of a process."""


class FileAnswer(Struct, frozen=True):
    """The answer to request `number`."""

    number: int
    error: int = 0
    """An errno, or 0 for success."""
    reason: str = ""
    size: int = 0
    is_folder: bool = False
    content: bytes = b""
    entries: tuple[tuple[str, int, bool], ...] = ()
    """The entries of a list: name, size, True for a folder."""


class OutFolder:
    """Performs requests in the folder `out`, and nowhere else."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._parts: dict[Path, int] = {}
        """Unfinished files, under a temporary name -> their bytes so far."""
        self._done: dict[bytes, int] = {}
        """Process -> its last complete upload: a last part may come twice."""

    def perform(self, peer: bytes, request: FileRequest) -> FileAnswer:
        """The answer; errors of the disk and refused names are answers, too."""
        try:
            path = self._path(request.name)
            match request.verb:
                case "list":
                    return FileAnswer(request.number, entries=tuple(self._entries(path)))
                case "info":
                    status = path.lstat()
                    return FileAnswer(request.number, size=status.st_size, is_folder=files.is_folder(path))
                case "get":
                    with files.opened(path) as stream:
                        stream.seek(max(0, request.offset))
                        return FileAnswer(request.number, content=stream.read(PART_BYTES))
                case "put":
                    self._put(peer, path, request)
                case "remove":
                    if path == self._out:
                        raise PermissionError(errno.EPERM, "the run's folder itself stays")
                    files.remove(path)
                case _:
                    raise OSError(errno.EINVAL, f"there is no request {request.verb!r}")
        except OSError as error:
            return FileAnswer(request.number, error.errno or errno.EIO, error.strerror or str(error))
        return FileAnswer(request.number)

    def close(self) -> None:
        """Remove unfinished files."""
        for part in self._parts:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        parts = name.split("/") if name else []
        wrong = any(not part or part in (".", "..") or "\\" in part or "\0" in part for part in parts)
        if wrong or len(parts) > _MOST_DEPTH or len(name.encode()) > _MOST_NAME_BYTES:
            raise PermissionError(errno.EPERM, f"{name!r} is not a name in the run's folder")
        path = self._out
        for part in parts:
            path = path / part
            if path.is_symlink():
                raise PermissionError(errno.ELOOP, f"{name!r} leads over a link, and none is followed")
        return path

    def _entries(self, folder: Path) -> Iterator[tuple[str, int, bool]]:
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            if Path(entry.path) not in self._parts and not entry.is_symlink():
                yield entry.name, entry.stat(follow_symlinks=False).st_size, entry.is_dir(follow_symlinks=False)

    def _put(self, peer: bytes, path: Path, request: FileRequest) -> None:
        if self._done.get(peer) == request.upload:
            return  # the answer was lost
        before = f".{path.name}.{peer.hex()}."
        part = path.with_name(f"{before}{request.upload}.part")
        if len(request.content) > PART_BYTES or len(self._parts) >= _MOST_PARTS:
            raise OSError(errno.EFBIG, "this part is too large, or too many files are unfinished")
        if request.offset == 0 and part not in self._parts:
            for old in [each for each in self._parts if each.parent == part.parent and each.name.startswith(before)]:
                old.unlink(missing_ok=True)  # given up
                del self._parts[old]
            self._make(path.parent)
            files.create(part).close()
            self._parts[part] = 0
        end = request.offset + len(request.content)
        if self._parts.get(part) == request.offset:
            with files.append(part) as stream:
                files.write(stream, request.content, part)
                self._parts[part] = end
        if self._parts.get(part) != end:
            raise OSError(errno.ESPIPE, f"no part of this file ends at {request.offset}")
        if request.last:
            with files.append(part) as stream:
                os.fsync(stream.fileno())
            part.replace(path)
            del self._parts[part]
            self._done[peer] = request.upload

    def _make(self, folder: Path) -> None:
        for each in [*reversed(folder.parents), folder]:
            if each == self._out or self._out in each.parents:
                files.made(each)


class FileServer:
    """A thread that serves `out` at `host`, on any free port, to processes that have its keys."""

    def __init__(self, out: Path, host: str) -> None:
        self._keys, self._folder = make_keys(), OutFolder(out)
        where = f"[{host}]" if ":" in host else host
        self._channel = ChannelServer[FileRequest, FileAnswer](f"tcp://{where}:*", self._keys, FileRequest)
        self._mark = mark_of(out)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="polytempo-files", daemon=True)
        self._thread.start()

    def to_plain(self) -> dict[str, Any]:
        """The address and keys for a process, as JSON takes them: a secret, which travels with its order only."""
        return {"address": self._channel.address, "keys": self._keys.to_plain(), "mark": self._mark}

    def close(self) -> None:
        """End the thread, and close the port."""
        self._over.set()
        self._thread.join()
        self._channel.close(_LOOK_S)
        self._folder.close()

    def _serve(self) -> None:
        while not self._over.is_set():
            if (asked := self._channel.take(_LOOK_S)) is not None:
                peer, request = asked
                self._channel.send(peer, self._folder.perform(peer, request))


@contextmanager
def served_files(out: object, address: EngineAddress, given: dict[str, Any]) -> Iterator[None]:
    """Serve the launcher's folder, and put the access to it into `given`, unless all processes see the folder."""
    if address.shares_files or not isinstance(out, Path):
        yield
        return
    server = FileServer(out.absolute(), address.host)
    given["files"] = server.to_plain()
    try:
        yield
    finally:
        server.close()
