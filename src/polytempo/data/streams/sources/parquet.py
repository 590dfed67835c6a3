"""Parquet: a shard for each row group of the files, and only the columns that are asked for.

group │ group │ … │ footer │ its length        the footer is read once; a group by its own bytes
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, final

import msgspec

from polytempo.core.calls.refusals import Incompatible, refuse
from polytempo.data.streams.sharded_data import ShardedData
from polytempo.data.streams.sources.arrow_rows import arrow_rows
from polytempo.data.streams.sources.kept_index import KEPT_FROM_BYTES, PartToCount, counted
from polytempo.data.streams.sources.sample_values import Fields, check_columns, fields, single
from polytempo.data.streams.sources.stream_files import (
    StreamFile,
    Urls,
    find_files,
    is_compressed,
    library,
    mark_of,
    opened,
)

ROWS_AT_ONCE = 1024
HELD_BYTES = 1 << 28
"""Footers that a source holds, by their bytes in the files."""
_BUFFER_BYTES = 1 << 20
_MAGIC = b"PAR1"


class Footer(msgspec.Struct, frozen=True):
    """The facts of a file that its footer has."""

    rows: list[int]
    """Rows of each row group."""
    columns: list[str]
    digest: str


@final
class Parquet(ShardedData):
    """The source that `parquet` makes."""

    def __init__(self, urls: Urls, columns: Sequence[str] | None, as_tuple: Fields | None) -> None:
        library("pyarrow.parquet", "parquet", "parquet")
        self._columns = list(columns or single(as_tuple or ())) or None
        self._as_tuple = None if as_tuple is None else tuple(as_tuple)
        files = self._files = find_files(urls)
        self._held: OrderedDict[StreamFile, Any] = OrderedDict()
        """Parsed footers, the last used one at the end."""
        self._held_bytes = 0
        small = [file for file in files if file.size < KEPT_FROM_BYTES]
        contents = counted([_footer_part(file) for file in small], bytes)
        ends = accumulate(map(len, contents))
        self._small = {file: each for file, each, end in zip(small, contents, ends, strict=True) if end <= HELD_BYTES}
        """Footers of small files, as they are in them."""
        self._footers = counted([self._count(file) for file in files], Footer)
        for file, footer in zip(files, self._footers, strict=True):
            check_columns(self._columns or (), footer.columns, file.url)
        self._groups = [
            (file, group)
            for file, footer in zip(files, self._footers, strict=True)
            for group in range(len(footer.rows))
        ]
        self.names = [f"{file.name}#{group}" for file, group in self._groups]
        self.counts = [rows for footer in self._footers for rows in footer.rows]
        if not any(self.counts):
            refuse({"data source", "no samples"}, where=", ".join(file.url for file in files[:3]))

    @property
    def identity(self) -> object:
        """The columns, and hashes of the footers: not the place of the files, which may be moved."""
        return ["parquet", self._columns, self._as_tuple, [footer.digest for footer in self._footers]]

    @property
    def content_mark(self) -> str | None:
        """The states of the files."""
        return mark_of(self._files)

    @property
    def blocks(self) -> float:
        """Row groups."""
        return len(self._groups)

    def read(self, shard: int, runs: Sequence[range]) -> Iterator[dict[str, Any]]:
        """The rows in `runs`; the row group is read up to the last of them, and rows between runs are not converted."""
        file, group = self._groups[shard]
        runs = [run for run in runs if run]
        if not runs:
            return
        parquet, metadata = library("pyarrow.parquet", "parquet", "parquet"), self._metadata(file)
        with opened(file, self._span(metadata.row_group(group)), ahead_bytes=1) as stream, _decoding(file):
            table = parquet.ParquetFile(stream, metadata=metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            batches = table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=self._columns)
            begin, at = 0, 0
            for batch in batches:
                end = begin + batch.num_rows
                while at < len(runs) and runs[at].start < end:
                    first, last = max(runs[at].start, begin), min(runs[at].stop, end)
                    yield from arrow_rows(batch.slice(first - begin, last - first))
                    if runs[at].stop > end:
                        break
                    at += 1
                if at == len(runs):
                    return
                begin = end
            refuse(
                {"data source", "damaged file"}, url=file.url, problem=f"row group {group} ends after {begin:,} rows"
            )

    def decode(self, raw: dict[str, Any]) -> Any:
        """The row, or the tuple of its fields."""
        return fields(raw, self._as_tuple, "the row")

    def _count(self, file: StreamFile) -> PartToCount[Footer]:
        is_large = file.size >= KEPT_FROM_BYTES  # of a small file the footer is there
        return _part("parquet", file, lambda: _footer(self._metadata(file), file), keep=is_large)

    def _metadata(self, file: StreamFile) -> Any:
        """The parsed footer of a file, held up to `HELD_BYTES` of them."""
        if file in self._held:
            self._held.move_to_end(file)
            return self._held[file]
        content = self._small.get(file) or counted([_footer_part(file)], bytes)[0]
        arrow = library("pyarrow", "parquet", "parquet")
        parquet = library("pyarrow.parquet", "parquet", "parquet")
        with _decoding(file):
            self._held[file] = parquet.read_metadata(arrow.BufferReader(_MAGIC + content))
        self._held_bytes += self._held[file].serialized_size
        while len(self._held) > 1 and self._held_bytes > HELD_BYTES:
            self._held_bytes -= self._held.popitem(last=False)[1].serialized_size
        return self._held[file]

    def _span(self, group: Any) -> int:
        """The bytes of a small group, which one request reads; 0: its columns are read one by one."""
        columns = [group.column(number) for number in range(group.num_columns)]
        wanted = [
            each for each in columns if self._columns is None or each.path_in_schema.split(".")[0] in self._columns
        ]
        size = sum(each.total_compressed_size for each in wanted)
        begins = [min(each.dictionary_page_offset or each.data_page_offset, each.data_page_offset) for each in wanted]
        ends = [begin + each.total_compressed_size for begin, each in zip(begins, wanted, strict=True)]
        span = max(ends, default=0) - min(begins, default=0)
        return span if 1 < span <= min(_BUFFER_BYTES, 1.05 * size) else 0


def _part(what: str, file: StreamFile, count: Callable[[], Any], *, keep: bool) -> PartToCount[Any]:
    key = f"{what}\n{file.url}\n{file.size}\n{file.tag}"
    return PartToCount(key, count, keep and bool(file.tag), small=file.size < KEPT_FROM_BYTES)


def _footer_part(file: StreamFile) -> PartToCount[bytes]:
    return _part("parquet footer", file, lambda: _footer_bytes(file), keep=True)


def _footer_bytes(file: StreamFile) -> bytes:
    """The end of the file: the footer, its length in 4 bytes, and "PAR1"."""
    tail = len(_MAGIC) + 4
    with opened(file, 0, ahead_bytes=1) as stream, _decoding(file):
        length = stream.seek(0, os.SEEK_END) if is_compressed(file) else file.size
        stream.seek(max(0, length - tail))
        end = stream.read(tail)
        size = int.from_bytes(end[:4], "little") + tail
        if end[4:] != _MAGIC or size + len(_MAGIC) > length:
            refuse({"data source", "damaged file"}, url=file.url, problem="it does not end with a footer of Parquet")
        stream.seek(length - size)
        return stream.read(size)


def _footer(metadata: Any, file: StreamFile) -> Footer:
    with _decoding(file):
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        columns = metadata.schema.to_arrow_schema()
        facts = [(group.num_rows, group.total_byte_size) for group in groups]
        digest = hashlib.sha256(f"{file.size} {facts} {columns.remove_metadata()}".encode()).hexdigest()
        return Footer([group.num_rows for group in groups], list(columns.names), digest)


@contextmanager
def _decoding(file: StreamFile) -> Iterator[None]:
    """Errors of pyarrow about the content become PT2604; errors of the filesystem, which have a number, pass."""
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, Incompatible) or getattr(error, "errno", None) is not None:
            raise
        refuse({"data source", "damaged file"}, url=file.url, problem=str(error))


def parquet(urls: Urls, *, columns: Sequence[str] | None = None, as_tuple: Fields | None = None) -> Parquet:
    """Samples from Parquet files: a dict for each row, a shard for each row group. Needs `polytempo[parquet]`.

        source = pt.data.parquet("s3://bucket/corpus/*.parquet", columns=["input_ids"])
        source = pt.data.parquet("table.parquet", as_tuple=("features", "label"))

    `urls`: paths or URLs of fsspec, patterns, ranges, or a list of these. `columns`: the columns that are read (None:
    all). `as_tuple`: samples are tuples of these columns, and only these are read; a list of columns in it becomes one
    vector of torch's default floating type, as in `as_tuple=(["age", "height"], "label")`.

    Numbers become tensors of the column's type, and lists of numbers tensors of one dimension; text is `str`, binary
    `bytes`; a column with nulls and every other type has Python's values.

    Cost: a footer is read once: the cache folder (`$POLYTEMPO_CACHE`) keeps it. A process holds up to 256 MiB of
    footers, and as much of the footers of files below 1 MiB. A range of rows reads its columns from the beginning of
    the row group to the end of the range; write row groups of some 1,000 to 100,000 rows.

    Errors: `Incompatible`, a ValueError with a code: PT2601 (no pyarrow), PT2602 (unreadable), PT2603 (changed since),
    PT2604 (broken off or another format), PT2605 (a column is missing), PT2606 (no samples).
    """
    return Parquet(urls, columns, as_tuple)
