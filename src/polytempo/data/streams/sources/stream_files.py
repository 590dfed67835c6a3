"""`StreamFile`: a file of a data source, by a path or a URL of fsspec, with the facts that show a change.

    "data/*.parquet"   "s3://bucket/{000..299}.tar"   ["a.jsonl", "b.jsonl.gz"]        names, lists, patterns, ranges

A file is opened as it was when it was found: another size, ETag or time of change is an error (PT2603). Every error of
a filesystem names the file (PT2602).
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from polytempo.core.calls.refusals import Incompatible, refuse
from polytempo.core.system.url_path import filesystem

Urls = str | Path | Sequence[str | Path]
"""Names of files: paths or URLs, patterns with `*`, ranges such as `{000..299}`, and lists of these."""

MOST_FILES = 1_000_000
BUFFER_BYTES = 1 << 18
BLOCK_BYTES = 1 << 20
"""A request to a remote filesystem asks for this much more than is read."""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_PATTERN = re.compile(r"[*?\[]")
_TAGS = ("ETag", "etag", "e_tag", "mtime", "LastModified", "last_modified", "updated", "created")
"""Entries of a filesystem that have a file's version or time of change, the best first."""
_DAMAGED = (EOFError, lzma.LZMAError, gzip.BadGzipFile)


class StreamFile(NamedTuple):
    """A file by its whole name, and its state when it was found."""

    url: str
    size: int
    """Bytes."""
    tag: str
    """The version or time of change that the filesystem has for it; "" where there is none."""

    @property
    def name(self) -> str:
        """The name without the folder, which is another one after the data were moved."""
        return self.url.rpartition("/")[2]


def mark_of(files: Sequence[StreamFile]) -> str | None:
    """A hash of the files' names and states; None where the filesystem has no state of one."""
    if not all(file.tag for file in files):
        return None
    return hashlib.sha256(repr([tuple(file) for file in files]).encode()).hexdigest()


def find_files(urls: Urls) -> list[StreamFile]:
    """The files of these names, in the order of the list; the files of a pattern in the order of their names.

    Errors: PT2602 for a file that cannot be read, PT2606 for a pattern without files. ValueError for a name given
    twice: an epoch has each sample once.
    """
    given = [urls] if isinstance(urls, str | Path) else list(urls)
    names = [name for each in given for spread in _spread(str(each)) for name in _matching(spread)]
    if not names:
        refuse({"data source", "no samples"}, where=", ".join(map(str, given)) or "an empty list of files")
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"{twice} is named twice; an epoch has each sample once, so name each file once")
    return [_found(name) for name in names]


def _spread(name: str) -> Iterator[str]:
    """Names with the numbers of `{000..299}` in its place."""
    found = _RANGE.search(name)
    if found is None:
        yield name
        return
    first, last = int(found[1]), int(found[2])
    if not first <= last < first + MOST_FILES:
        raise ValueError(f"{name}: {found[0]} names {last - first + 1:,} files; a range has 1 to {MOST_FILES:,}")
    for number in range(first, last + 1):
        yield from _spread(f"{name[: found.start()]}{number:0{len(found[1])}d}{name[found.end() :]}")


def _matching(name: str) -> list[str]:
    """The whole names of a file, or of the files of a pattern."""
    with reading(name):
        fs, path = filesystem(name)
        if "::" in name:  # a filesystem in a file of another one
            return [name]
        found = sorted(map(str, fs.glob(path))) if _PATTERN.search(name) else [path]
        return [str(fs.unstrip_protocol(each)) if "://" in name else each for each in found]


def _found(url: str) -> StreamFile:
    with reading(url):
        fs, path = filesystem(url)
        info = fs.info(path)
        if info["type"] != "file" or info.get("size") is None:
            refuse({"data source", "unreadable file"}, url=url, problem="it is not a file with a known size")
        return StreamFile(url, int(info["size"]), next((str(info[key]) for key in _TAGS if info.get(key)), ""))


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Reads of `url` inside: errors of its filesystem become PT2602, and errors of a decompressor PT2604."""
    try:
        yield
    except Incompatible:
        raise
    except _DAMAGED as error:
        refuse({"data source", "damaged file"}, url=url, problem=str(error) or type(error).__name__)
    except Exception as error:  # each filesystem has errors of its own
        if isinstance(error, ValueError | TypeError | KeyError | AttributeError | RuntimeError):
            raise
        refuse({"data source", "unreadable file"}, url=url, problem=f"{type(error).__name__}: {error}")


@contextmanager
def opened(file: StreamFile, buffer_bytes: int = BUFFER_BYTES, ahead_bytes: int = BLOCK_BYTES) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed by its name (.gz, .bz2, .xz, .zst). It is the file that was found, or PT2603.

    `buffer_bytes`: a read asks for at least so many; 0: for its own bytes. `ahead_bytes`: so many more are asked from a
    remote filesystem. Where it is compressed, a seek forward reads everything up to there, and a seek backward begins
    again.
    """
    with reading(file.url):
        fs, path = filesystem(file.url)
        fs.invalidate_cache(path)
        now = _found(file.url)
        if now != file:
            refuse(
                {"data source", "changed file"},
                url=file.url,
                was=f"{file.size:,} bytes, {file.tag or 'no tag'}",
                now=f"{now.size:,} bytes, {now.tag or 'no tag'}",
            )
        with _bytes_of(fs, path, buffer_bytes, ahead_bytes) as raw:
            unpack = _unpacker(file.url)
            if unpack is None:
                yield raw
                return
            with unpack(raw) as stream:
                yield cast(BinaryIO, stream)


def _bytes_of(fs: Any, path: str, buffer_bytes: int, ahead_bytes: int) -> BinaryIO:
    """The file for one reader alone, with a buffer."""
    if "file" in fs.protocol:
        return open(path, "rb", buffering=buffer_bytes)
    raw = fs.open(path, "rb", block_size=ahead_bytes)
    if isinstance(raw, io.BytesIO):  # memory:// hands every reader the same object
        return io.BytesIO(raw.getvalue())
    return cast(BinaryIO, io.BufferedReader(raw, buffer_bytes) if buffer_bytes else raw)


def is_compressed(file: StreamFile) -> bool:
    """True if a range of the file is found by reading everything before it."""
    return file.url.endswith((*_UNPACKERS, ".zst"))


def _zstd(raw: BinaryIO) -> Any:
    zstandard = library("zstandard", "zstd", ".zst files")
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True), BUFFER_BYTES)


_UNPACKERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def _unpacker(url: str) -> Callable[[Any], Any] | None:
    if url.endswith(".zst"):
        return _zstd
    return next((unpack for suffix, unpack in _UNPACKERS.items() if url.endswith(suffix)), None)


def library(module: str, extra: str, reader: str) -> Any:
    """The module of an extra. PT2601 where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        if error.name is not None and not module.startswith(error.name.partition(".")[0]):
            raise
        refuse({"data source", "no library"}, reader=reader, library=module, extra=extra)
        raise
