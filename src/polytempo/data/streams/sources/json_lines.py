"""JSON lines: a sample for each line of text files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, final

import msgspec

from polytempo.core.calls.refusals import refuse
from polytempo.data.streams.sources.marked_files import MarkedFiles, Raw
from polytempo.data.streams.sources.sample_values import Fields, fields, tensor_values
from polytempo.data.streams.sources.stream_files import StreamFile, Urls

MAX_LINE_BYTES = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@final
class JsonLines(MarkedFiles):
    """The source that `json_lines` makes."""

    reader = "json_lines"

    def __init__(self, urls: Urls, as_tuple: Fields | None, max_line_bytes: int) -> None:
        self._as_tuple, self._limit = as_tuple, max_line_bytes
        super().__init__(urls, as_tuple and list(as_tuple))

    def walk(self, stream: BinaryIO, file: StreamFile, wanted: Iterator[bool]) -> Iterator[tuple[int, bytes | None]]:
        """Lines that are not blank."""
        offset = stream.tell()
        each: bool | None = next(wanted, None)
        while each is not None and (line := stream.readline(self._limit + 1)):
            if len(line) > self._limit:
                refuse({"data source", "huge line"}, url=file.url, offset=offset, limit=self._limit)
            if not line.isspace():
                yield offset, line if each else None
                each = next(wanted, None)
            offset += len(line)

    def decode(self, raw: Raw) -> Any:
        """The line's object, or the tuple of its fields."""
        line = raw.content if raw.offset else raw.content.removeprefix(_BYTE_ORDER_MARK)
        try:
            found = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            start = line[:60].decode(errors="replace").strip()
            problem = f"at byte {raw.offset:,}, {start!r} is not a JSON object: {error}"
            refuse({"data source", "damaged file"}, url=raw.url, problem=problem)
            raise
        return fields(tensor_values(found), self._as_tuple, raw.url)


def json_lines(urls: Urls, *, as_tuple: Fields | None = None, max_line_bytes: int = MAX_LINE_BYTES) -> JsonLines:
    """Samples from files of JSON lines: a dict for each line that is not blank, a shard for each file.

        source = pt.data.json_lines("corpus/*.jsonl")
        source = pt.data.json_lines("s3://bucket/part-{000..299}.jsonl.gz", as_tuple=("text", "label"))

    `urls`: paths or URLs of fsspec, patterns, ranges, or a list of these. Numbers and lists of numbers become tensors
    (int64, torch's default floating type, bool); text stays `str`. `as_tuple`: samples are tuples of these fields; a
    list of fields in it becomes one vector of torch's default floating type, as `(["age", "height"], "label")`.

    Cost: one pass over each file the first time, which notes the place of a line every 64 KiB; the cache folder
    (`$POLYTEMPO_CACHE`) keeps these places. A range of a shard then reads its own bytes and at
    most 64 KiB more. Files that end with .gz, .bz2, .xz or .zst are read from their beginning up to the range.

    Errors: `Incompatible`, a ValueError with a code: PT2601 (.zst without its library), PT2602 (unreadable), PT2603
    (changed since), PT2604 (a line is not a JSON object), PT2605 (a field is missing), PT2606 (no samples), PT2609 (a
    line of more than `max_line_bytes`).
    """
    return JsonLines(urls, as_tuple, max_line_bytes)
