"""WebDataset: samples in tar files, each as members with one key and different extensions.

0001.jpg  0001.cls │ 0002.jpg  0002.cls │ …            {"__key__": "0001", "jpg": …, "cls": …}, …
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO, final

import numpy as np
import torch
from PIL import Image

from polytempo.core.calls.refusals import refuse
from polytempo.data.streams.sources.marked_files import MarkedFiles, Raw
from polytempo.data.streams.sources.sample_values import fields
from polytempo.data.streams.sources.stream_files import StreamFile, Urls, is_compressed

KEY = "__key__"
MAX_MEMBER_BYTES = 4 << 30
_NAME = re.compile(r"((?:.*/|)[^./][^.]*)\.([^/]*)", re.DOTALL)
_PICKLED = frozenset({"pt", "pth", "pkl", "pickle", "pyd"})
_BLOCK = tarfile.BLOCKSIZE

Decode = bool | Mapping[str, Callable[[bytes], Any]]
"""True: by extension. False: bytes. A mapping from extensions to functions goes before the built-in ones."""


@final
class TarSamples(MarkedFiles):
    """The source that `webdataset` makes."""

    reader = "webdataset"
    counting_buffer = 1 << 12  # between two headers a file that can seek is not read

    def __init__(self, urls: Urls, as_tuple: Sequence[str] | None, decode: Decode) -> None:
        self._as_tuple, self._decode = as_tuple, decode
        own = sorted(decode) if isinstance(decode, Mapping) else decode
        super().__init__(urls, [as_tuple and list(as_tuple), own])

    def walk(
        self, stream: BinaryIO, file: StreamFile, wanted: Iterator[bool]
    ) -> Iterator[tuple[int, dict[str, bytes] | None]]:
        """Samples: members with the same key that follow each other."""
        key, offset, content = None, 0, dict[str, bytes]()
        each: bool | None = False
        for member, read in _members(stream, file):
            found, extension = _parted(member.name)
            if extension is None:
                continue
            if found != key:
                if key is not None:
                    yield offset, content if each else None
                each = next(wanted, None)
                if each is None:
                    return
                key, offset, content = found, member.offset, {KEY: found.encode()}
            if extension in content:
                refuse(
                    {"data source", "damaged file"}, url=file.url, problem=f"the member {member.name!r} is there twice"
                )
            content[extension] = read() if each else b""
        if key is not None and each is not None:
            yield offset, content if each else None

    def decode(self, raw: Raw) -> Any:
        """The sample with its members decoded, or the tuple of its fields."""
        key = raw.content[KEY].decode()
        sample: dict[str, Any] = {KEY: key}
        for extension, content in raw.content.items():
            if extension != KEY and (self._as_tuple is None or extension in self._as_tuple):
                sample[extension] = self._member(raw.url, f"{key}.{extension}", extension, content)
        return fields(sample, self._as_tuple, f"{raw.url}, sample {key!r}")

    def _member(self, url: str, member: str, extension: str, content: bytes) -> Any:
        if self._decode is False:
            return content
        own = self._decode if isinstance(self._decode, Mapping) else {}
        last = extension.rpartition(".")[2].lower()
        function = own.get(extension) or own.get(last)
        if function is not None:
            return function(content)
        if last in _PICKLED:
            refuse({"data source", "pickled sample"}, url=url, member=member, extension=extension)
        try:
            return _DECODERS[last](content) if last in _DECODERS else content
        except Exception as error:  # each library has errors of its own
            problem = f"the member {member!r} cannot be decoded: {error}"
            refuse({"data source", "damaged file"}, url=url, problem=problem)
            raise


def _members(stream: BinaryIO, file: StreamFile) -> Iterator[tuple[tarfile.TarInfo, Callable[[], bytes]]]:
    """The plain files of an archive, from the stream's position on, each with a function that reads it."""
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # a million samples have a million
                if member.isdir():
                    continue
                _check(member, file)
                yield member, lambda: _content(archive, member)
            _check_end(stream, archive.offset)
    except (tarfile.TarError, EOFError) as error:
        refuse({"data source", "damaged file"}, url=file.url, problem=str(error) or type(error).__name__)


def _check_end(stream: BinaryIO, offset: int) -> None:
    """An archive ends with zeros; the rest of a compressed file is read, which checks its sum."""
    stream.seek(offset)
    if len(ending := stream.read(_BLOCK)) < _BLOCK:
        raise tarfile.ReadError(f"it breaks off at byte {offset:,}, without the end of an archive")
    while ending:
        if ending.strip(b"\0"):
            raise tarfile.ReadError(f"there is neither a member nor the end of the archive at byte {offset:,}")
        offset += len(ending)
        ending = stream.read(1 << 20)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    assert stream is not None
    return stream.read()


def _check(member: tarfile.TarInfo, file: StreamFile) -> None:
    path, problem = PurePosixPath(member.name), ""
    if member.issym() or member.islnk():
        problem = f"is a link to {member.linkname!r}"
    elif not member.isreg() or member.issparse():
        problem = "is not a plain file"
    elif path.is_absolute() or ".." in path.parts or "\0" in member.name:
        problem = "leads out of the archive"
    if problem:
        refuse({"data source", "unsafe member"}, url=file.url, member=member.name, problem=problem)
    most = MAX_MEMBER_BYTES if is_compressed(file) else min(MAX_MEMBER_BYTES, file.size - member.offset_data)
    if member.size > most:
        raise tarfile.ReadError(f"the member {member.name!r} has {member.size:,} bytes, and at most {most:,} are there")


def _parted(name: str) -> tuple[str, str | None]:
    """The key and the extension: the name up to the first dot of its last part, and the rest in small letters."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2].lower()) if found else (name, None)


def _picture(content: bytes) -> torch.Tensor:
    """uint8 (3, height, width)."""
    with Image.open(io.BytesIO(content)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _array(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("png", "jpg", "jpeg", "ppm", "pgm", "webp", "bmp", "gif"), _picture),
    "npy": _array,
}


def webdataset(urls: Urls, *, as_tuple: Sequence[str] | None = None, decode: Decode = True) -> TarSamples:
    """Samples from tar files in the form of WebDataset: a shard for each file, a dict for each sample.

        source = pt.data.webdataset("s3://bucket/train-{000..299}.tar", as_tuple=("jpg", "cls"))

    Members that follow each other and have the same name up to its first dot are a sample; the rest of the name is the
    field. "__key__" holds the name. `as_tuple`: samples are tuples of these fields, and no other is decoded.

    `decode=True`: txt as `str`; json; cls as a number; npy as a tensor; png, jpg and other pictures as uint8 (3,
    height, width); others as bytes. A mapping such as `{"jpg": function}` gives functions of the bytes for some fields.
    `decode=False`: bytes. Nothing is unpickled (PT2608): pt, pth and pkl need such a function.

    Cost: the first time, the headers of each file are read, and contents are passed over where the file can seek; the
    cache folder (`$POLYTEMPO_CACHE`) keeps the places of samples, one every 64 KiB. A
    range of a shard then reads its own bytes and at most 64 KiB more. A compressed archive (.tar.gz) is read
    from its beginning.

    Errors: `Incompatible`, a ValueError with a code: PT2602 (unreadable), PT2603 (changed since), PT2604 (broken off,
    another format, a member that cannot be decoded), PT2605 (a field is missing), PT2606 (no samples), PT2607 (links,
    devices, names with ".."), PT2608 (pickle).
    """
    return TarSamples(urls, as_tuple, decode)
