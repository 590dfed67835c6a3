"""`UrlPath`: a place in a filesystem of fsspec (`s3://bucket/run`, `memory://run`), with a run's share of `Path`.

    out="s3://bucket/run"  ──▶  place  ──▶  UrlPath        out="runs/digits"  ──▶  Path, as always

An object appears whole when it is written, under the name that it keeps: there is no rename and nothing is appended. So
parts that must be complete or absent are written under new names, and last of all an object that refers to them (see
`training.checkpoint.checkpoint_objects`, `server.snapshots.disk`).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_SQUEEZED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_LOGIN = re.compile(r"(?<!abfs)(?<!abfss)(://)[^/?#\s]*@")  # abfs://container@account has none
_QUERY = re.compile(
    r"(\bhttps?://[^?\s]*)\?\S*", re.IGNORECASE
)  # in s3://bucket/part-?.tar it is a letter of a pattern


class UrlPath:
    """A place by its URL. Members are as in `pathlib.Path`; every error is an OSError that names the URL.

    The filesystem is looked up at each use, so a forked process gets connections of its own.
    """

    __slots__ = ("url",)

    def __init__(self, url: str) -> None:
        if ".." in url.split("/"):
            raise ValueError(f"{url}: '..' leads out of the folder; write the URL without it")
        self.url = url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UrlPath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"UrlPath({self.url!r})"

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> UrlPath:
        """The place above it."""
        return UrlPath(self.url.rstrip("/").rpartition("/")[0])

    def with_name(self, name: str) -> UrlPath:
        """The same with another last part."""
        return self.parent / name

    def absolute(self) -> UrlPath:
        """Itself."""
        return self

    def resolve(self) -> UrlPath:
        """Itself."""
        return self

    # ------------------------------------------------------------------ listing

    def exists(self) -> bool:
        """True if an object has this name, or a name below it."""
        with self._opened() as (fs, path):
            return bool(fs.exists(path))

    def is_file(self) -> bool:
        """True if an object has this name."""
        with self._opened() as (fs, path):
            return bool(fs.isfile(path))

    def is_dir(self) -> bool:
        """True if objects are below this name."""
        with self._opened() as (fs, path):
            return bool(fs.isdir(path))

    def names(self) -> list[str]:
        """Names of the objects in it, sorted; [] where there are none."""
        return [name for name, _ in self.entries()]

    def entries(self) -> list[tuple[str, bool]]:
        """`names`, each with True if objects are below it, by one listing."""
        with self._opened() as (fs, path):
            try:
                listed = fs.ls(path, detail=True)
            except FileNotFoundError:
                return []
            found = {str(entry["name"]).rstrip("/"): entry["type"] == "directory" for entry in listed}
            own = path.strip("/")
            return sorted((name.rpartition("/")[2], above) for name, above in found.items() if name.strip("/") != own)

    def iterdir(self) -> Iterator[UrlPath]:
        """The places in it."""
        return iter([self / name for name in self.names()])

    def size(self) -> int:
        """The object's bytes."""
        with self._opened() as (fs, path):
            return int(fs.info(path)["size"])

    # ------------------------------------------------------------------ reading and writing

    def read(self, most_bytes: int | None = None) -> bytes:
        """The object, or its first `most_bytes`. None: the object, by one request."""
        with self._opened() as (fs, path):
            if most_bytes is None:
                return bytes(fs.cat_file(path))
            size = fs.info(path).get("size")
            if size is None:  # a web server that does not tell it, nor has ranges
                with fs.open(path, "rb") as stream:
                    return _first(stream, most_bytes)
            whole = int(size) <= most_bytes
            content: bytes = fs.cat_file(path) if whole else fs.cat_file(path, start=0, end=most_bytes)
            return content[:most_bytes]

    def write(self, content: bytes) -> None:
        """Put a whole object, in place of another one of this name."""
        self._put(lambda fs, path: fs.pipe_file(path, content))

    def create(self, content: bytes) -> None:
        """Put a new object. FileExistsError where there is one, and then that stays.

        The filesystem decides which of two is first, if it can (objects of S3, Google and Azure by a condition);
        elsewhere both may be.
        """
        if self.exists():
            raise FileExistsError(errno.EEXIST, "there is such an object", self.url)
        self._put(lambda fs, path: _created(fs, path, content))

    def upload(self, file: Path) -> None:
        """Put the content of a local file, in parts where the filesystem has parts."""
        self._put(lambda fs, path: fs.put_file(str(file), path))

    def download(self, file: Path) -> None:
        """Copy the object into a new local file."""
        with self._opened() as (fs, path):
            fs.get_file(path, str(file))

    def remove(self) -> None:
        """Remove the object, and all below its name; nothing where there is none."""
        with self._opened() as (fs, path):
            if fs.exists(path):
                fs.rm(path, recursive=True)

    def _put(self, put: Callable[[Any, str], object]) -> None:
        """Do it, and make the folders above first where a filesystem has folders and says that there are none."""
        with self._opened() as (fs, path):
            try:
                put(fs, path)
            except FileNotFoundError:
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                put(fs, path)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """The filesystem as it is now, and the path in it."""
        try:
            fs, path = filesystem(self.url)
            fs.invalidate_cache()  # another process may have written
            yield fs, path
        except (ValueError, GeneratorExit):
            raise
        except Exception as error:  # each filesystem has errors of its own
            raise OSError(_number(error), str(error) or type(error).__name__, self.url) from error


def _created(fs: Any, path: str, content: bytes) -> None:
    try:
        fs.pipe_file(path, content, mode="create")
    except FileNotFoundError:
        raise
    except Exception as error:  # it is there, or the filesystem takes no `mode`
        if fs.exists(path):
            raise FileExistsError(errno.EEXIST, "there is such an object", path) from error
        fs.pipe_file(path, content)


def _first(stream: BinaryIO, most_bytes: int) -> bytes:
    """The stream's first `most_bytes`; a read from a network may have fewer bytes than were asked for."""
    content = bytearray()
    while len(content) < most_bytes and (part := stream.read(most_bytes - len(content))):
        content += part
    return bytes(content)


def _number(error: Exception) -> int:
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT
    if isinstance(error, FileExistsError):
        return errno.EEXIST
    if isinstance(error, PermissionError):
        return errno.EACCES
    return (error.errno if isinstance(error, OSError) else None) or errno.EIO


Place = Path | UrlPath
"""The place of a run's files."""
P = TypeVar("P", Path, UrlPath, Path | UrlPath)


def place(text: str | Path | UrlPath) -> Place:
    """A `UrlPath` for a URL, a `Path` for anything else; `file://` is a path of this machine.

    ValueError for a URL that was made a `Path`, which drops one of its slashes.
    """
    if isinstance(text, UrlPath):
        return text
    if isinstance(text, Path):
        if text.parts and _SQUEEZED.fullmatch(text.parts[0]):
            raise ValueError(f"{text} was a URL before it became a Path, which has dropped a slash; give it as a str")
        return text
    url = _URL.fullmatch(text)
    if url is None:
        return Path(text)
    return Path(url[2]) if url[1] in ("file", "local") else UrlPath(text.rstrip("/"))


def without_secrets(text: str) -> str:
    """`text` without the logins of URLs, and without the queries of http(s), which may be signatures.

    Files that a run leaves have such texts: https://me:key@host/t.csv?sig=1 becomes https://host/t.csv.
    """
    return _QUERY.sub(r"\1", _LOGIN.sub(r"\1", text))


def local_path(path: Place) -> Path:
    """`path`, which is known to be one of this machine."""
    assert isinstance(path, Path), f"{path} is a URL"
    return path


def filesystem(url: str, **options: Any) -> tuple[Any, str]:
    """The filesystem of a URL, and the path in it. ValueError where a package is missing, which it names.

    `options`: of the filesystem's class.
    """
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        scheme = url.partition("://")[0]
        raise ValueError(
            f"{url}: no filesystem is known for {scheme}:// ({error}); install the package of fsspec that has it (s3fs "
            "for s3://, gcsfs for gs://, adlfs for abfs://), or name a folder"
        ) from error
    return fs, str(path)
