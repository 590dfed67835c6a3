"""`MarkedFiles`: files with samples one behind the other, and marks: a range is read from the mark before it.

    file      │ sample 0 │ 1 │ 2 │ … │ 117 │ 118 │ … │ 240 │        a mark every 64 KiB: (sample, offset)
    marks     (0, 0)              (117, 65591)        (233, 131201)
    read(shard, [range(120, 200)])   └─ seek here, skip 3, yield 80

A compressed file has its first mark alone: a range of it is found by reading from its beginning.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import repeat
from math import inf
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from polytempo.core.calls.refusals import refuse
from polytempo.data.streams.sharded_data import ShardedData
from polytempo.data.streams.sources.kept_index import KEPT_FROM_BYTES, PartToCount, counted
from polytempo.data.streams.sources.stream_files import (
    BUFFER_BYTES,
    StreamFile,
    Urls,
    find_files,
    is_compressed,
    mark_of,
    opened,
)

MARK_BYTES = 1 << 16


class Marks(msgspec.Struct, frozen=True):
    """The number of samples of a file, and the places of some."""

    count: int
    samples: bytes
    """int64: numbers of samples, rising from 0."""
    offsets: bytes
    """int64: the offset of each of them."""


class Raw(NamedTuple):
    """A sample as it is in its file."""

    url: str
    offset: int
    content: Any


class MarkedFiles(ShardedData):
    """A source with a shard for each file; a subclass knows its format."""

    reader: str
    counting_buffer: int = BUFFER_BYTES
    """Bytes that a count reads at a time."""

    def __init__(self, urls: Urls, form: object) -> None:
        """Each file is counted by one pass over it, or its kept marks are taken. `form`: the options that decide the
        samples, as plain data.
        """
        self.files = find_files(urls)
        self.marks = counted([self._part(file) for file in self.files], Marks)
        self.names = [file.name for file in self.files]
        self.counts = [marks.count for marks in self.marks]
        self._form = form
        if not any(self.counts):
            refuse({"data source", "no samples"}, where=", ".join(file.url for file in self.files[:3]))

    @abstractmethod
    def walk(self, stream: BinaryIO, file: StreamFile, wanted: Iterator[bool]) -> Iterator[tuple[int, Any]]:
        """Walk from the stream's position on: each sample's offset, and its content if it is `wanted`, else None.

        It ends with `wanted`. PT2604 where the file does not end as its format demands.
        """

    @property
    def identity(self) -> object:
        """The format, and a hash of the marks: not the place of the files, which may be moved."""
        digest = hashlib.sha256()
        for file, marks in zip(self.files, self.marks, strict=True):
            digest.update(f"{file.size} ".encode() + marks.samples + marks.offsets)
        return [self.reader, self._form, digest.hexdigest()]

    @property
    def content_mark(self) -> str | None:
        """The states of the files."""
        return mark_of(self.files)

    @property
    def blocks(self) -> float:
        """The files, if one is compressed."""
        return len(self.files) if any(map(is_compressed, self.files)) else inf

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[Raw]:
        """The samples in `runs`: each run is looked for from the last mark before it, or from the run before."""
        file = self.files[shard]
        runs = [run for run in runs if run]
        with opened(file) as stream:
            for first, offset, section in _sections(self.marks[shard], runs):
                if offset != stream.tell():  # a stream of zstandard cannot seek, and has its first mark alone
                    stream.seek(offset)
                found, expected = 0, sum(map(len, section))
                for place, content in self.walk(stream, file, _wanted(first, section)):
                    if content is not None:
                        found += 1
                        yield Raw(file.url, place, content)
                if found < expected:
                    problem = f"it has fewer than the {self.counts[shard]:,} samples that were counted"
                    refuse({"data source", "damaged file"}, url=file.url, problem=problem)

    def _part(self, file: StreamFile) -> PartToCount[Marks]:
        key = f"{self.reader}\n{file.url}\n{file.size}\n{file.tag}"
        return PartToCount(key, lambda: self._marks(file), bool(file.tag), small=file.size < KEPT_FROM_BYTES)

    def _marks(self, file: StreamFile) -> Marks:
        samples, offsets, count = [0], [0], 0
        far = float("inf") if is_compressed(file) else MARK_BYTES
        with opened(file, self.counting_buffer) as stream:
            for count, (offset, _) in enumerate(self.walk(stream, file, repeat(False)), 1):
                if offset - offsets[-1] >= far:
                    samples.append(count - 1)
                    offsets.append(offset)
        return Marks(count, np.array(samples, np.int64).tobytes(), np.array(offsets, np.int64).tobytes())


def _sections(marks: Marks, runs: Sequence[range]) -> Iterator[tuple[int, int, list[range]]]:
    """Runs that are read from one mark on: its sample and offset, and the runs."""
    samples, offsets = (np.frombuffer(each, np.int64).tolist() for each in (marks.samples, marks.offsets))
    section: list[range] = []
    begin = -1
    for run in runs:
        mark = bisect_right(samples, run.start) - 1
        if section and samples[mark] <= section[-1].stop:
            section.append(run)
            continue
        if section:
            yield samples[begin], offsets[begin], section
        begin, section = mark, [run]
    if section:
        yield samples[begin], offsets[begin], section


def _wanted(first: int, runs: Sequence[range]) -> Iterator[bool]:
    """True for the samples in `runs`, from sample `first` on."""
    for run in runs:
        yield from repeat(False, run.start - first)
        yield from repeat(True, len(run))
        first = run.stop
