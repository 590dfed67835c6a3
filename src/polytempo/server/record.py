"""The record of a real run: the order of messages at each machine. `polytempo replay` follows it.

    {"format":"polytempo-record","version":2,"machine":"shard 0"}
    ["members",1,0,[[0,1],[1,1]],[]]                      the coordinator's request 1; the shard's version 0
    ["pull",0,1,1,0,-1,0]                                 worker 0, life 1, request 1, clock 0, basis -1, version 0
    ["push",1,1,2,1,0,32,[5],1,3735928559]                worker 1, …, 32 samples of ticket 5; version 1 afterwards

One file a machine: each copy of a shard, and the coordinator. A shard is a deterministic machine, so a replay needs
only the order of its entries: gradients and weights come out the same, bit by bit, and are not recorded. `version`
serves to compare: the shard's version after the entry, for a pull the version that it reads if the rule answers
immediately. So does a push's `check`, see `check_of`. A worker's join needs no entry: it is the first call of its life.
An early end needs one: it follows from a score, which comes at an undetermined moment.

Each line leaves the process immediately, or after `flush_every_s`; lines that have left survive the process. A torn
last line (the process died while it wrote) is dropped when the record is read, which sets `Record.torn`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, final
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.core.system.files import opened, write
from polytempo.server.message import Ask, Elapsed, Inquire, Members, Pull, Push, PushPart, Request, Save

FORMAT = "polytempo-record"
VERSION = 2
MAX_LINE_BYTES = 1 << 20
MAX_RECORD_BYTES = 4 << 30
_MAX_BUFFERED_BYTES = 1 << 16
_CHECKED_ELEMENTS = 256


class RecordError(PolytempoError):
    """A record is damaged, or of another version."""


class RequestEntry(msgspec.Struct, frozen=True, array_like=True):
    """A worker's request."""

    worker: int
    incarnation: int
    sequence: int


class PartEntry(RequestEntry, frozen=True, array_like=True):
    """Another worker's request within a push of a host."""

    clock: int
    basis: int
    samples: int
    tickets: tuple[int, ...]


class PushEntry(PartEntry, frozen=True, array_like=True, tag="push"):
    """A shard applied a `Push`."""

    version: int
    check: int = 0
    """`check_of` the gradient, its rows included."""


class HostPushEntry(PushEntry, frozen=True, array_like=True, tag="host_push"):
    """A shard applied a `Push` with parts; the check is of the sum."""

    parts: tuple[PartEntry, ...] = ()


class PullEntry(RequestEntry, frozen=True, array_like=True, tag="pull"):
    """A shard applied a `Pull`."""

    clock: int
    basis: int
    version: int


class Enrolling(msgspec.Struct, frozen=True, array_like=True, tag="members"):
    """A shard applied a `Members`."""

    sequence: int
    version: int
    members: tuple[tuple[int, int], ...]
    resting: tuple[int, ...] = ()


class Saving(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """A shard applied a `Save`; in the coordinator's record (0, 0, number): it ordered snapshot `number`."""

    sequence: int
    version: int
    number: int


class Inquiring(msgspec.Struct, frozen=True, array_like=True, tag="inquire"):
    """A shard applied an `Inquire`."""

    sequence: int
    version: int


class Elapsing(msgspec.Struct, frozen=True, array_like=True, tag="elapsed"):
    """A shard ended the window of its rule. It had opened at version `opened` of the weights."""

    opened: int
    version: int


class Asking(RequestEntry, frozen=True, array_like=True, tag="ask"):
    """The coordinator took a worker's call for work."""

    done: tuple[int, ...]


class Noting(msgspec.Struct, frozen=True, array_like=True, tag="noted"):
    """The coordinator took a shard's answer that request `sequence` is done."""

    shard: int
    sequence: int


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """The coordinator gave up a node: a worker, or a copy of a shard."""

    node: int


class Stopping(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The coordinator ended the run early, for a score had reached its target."""


Entry = (
    PushEntry
    | HostPushEntry
    | PullEntry
    | Enrolling
    | Saving
    | Inquiring
    | Elapsing
    | Asking
    | Noting
    | Lost
    | Stopping
)


class Record(NamedTuple):
    """One machine's record. `torn`: its last line was cut, and is left out."""

    machine: str
    entries: list[Entry]
    torn: bool
    node: int = 0
    first: int = 1
    """The number of the first entry in the machine's log: a copy that joins later begins later."""


class _Header(msgspec.Struct, frozen=True, omit_defaults=True):
    format: str
    version: int
    machine: str
    node: int = 0
    first: int = 1


def entry_of(request: Request | Ask | Elapsed, version: int = 0) -> Entry:
    """The entry of a message, without its payload. `version`: the shard's after it has applied the message."""
    if isinstance(request, Elapsed):
        return Elapsing(request.version, version)
    who = (request.worker, request.incarnation, request.sequence)
    match request:
        case Push():
            check = check_of(request.gradient, *(rows.values for rows in request.rows))
            facts = (*who, request.clock, request.basis, request.samples, request.tickets, version, check)
            if not request.parts:
                return PushEntry(*facts)
            return HostPushEntry(*facts, tuple(map(_part_entry, request.parts)))
        case Pull():
            return PullEntry(*who, request.clock, request.basis, version)
        case Members():
            return Enrolling(request.sequence, version, request.members, request.resting)
        case Save():
            return Saving(request.sequence, version, request.number)
        case Inquire():
            return Inquiring(request.sequence, version)
        case Ask():
            return Asking(*who, request.done)
    raise ValueError(
        f"a {type(request).__name__} is not an entry of a machine's record; record requests and calls for work"
    )


def _part_entry(part: PushPart) -> PartEntry:
    return PartEntry(part.worker, part.incarnation, part.sequence, part.clock, part.basis, part.samples, part.tickets)


def requests_of(entry: Entry) -> list[PushEntry | PullEntry | PartEntry | Asking]:
    """The workers' requests that an entry stands for: several where it is the push of a host."""
    if isinstance(entry, HostPushEntry):
        return [entry, *entry.parts]
    return [entry] if isinstance(entry, PushEntry | PullEntry | Asking) else []


def check_of(*gradients: Tensor) -> int:
    """A checksum of about 256 elements of each: where rounding differs, nearly all elements differ."""
    check = 0
    for gradient in gradients:
        flat = gradient.detach().view(-1)
        some = flat[:: flat.numel() // _CHECKED_ELEMENTS + 1].contiguous()
        check = crc32(some.view(torch.uint8).numpy().tobytes(), check)
    return check


@final
class Recorder:
    """Writes one machine's record to a new file. Close it, or use it in `with`.

    with Recorder(folder / "shard-0.jsonl", "shard 0") as recorder:
        recorder.append(entry_of(push, version=7), now_s)

    Lines leave the process when `flush_every_s` have passed since the last time, or 64 KiB have gathered. At 0 each
    line leaves immediately, which costs some microseconds; then the record is whole even if the process is killed.
    Lines that have left survive the end of the process, not of the machine: the run does not wait for the disk. A
    record ends at `max_bytes`, while the run goes on.
    """

    def __init__(
        self,
        path: Path,
        machine: str,
        flush_every_s: float = 0.0,
        *,
        node: int = 0,
        first: int = 1,
        max_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        """FileExistsError where there is a record already: a restarted run writes another one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("xb", buffering=0)
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray(self._encoder.encode(_Header(FORMAT, VERSION, machine, node, first)) + b"\n")
        self._left_bytes = max_bytes
        self._flush_every_s = flush_every_s
        self._flushed_s: float | None = None
        self.flush()

    def append(self, entry: Entry, now_s: float) -> None:
        """One more entry. ValueError where it is longer than a line may be."""
        line = self._encoder.encode(entry)
        if len(line) >= MAX_LINE_BYTES:
            raise ValueError(f"an entry of {len(line)} bytes; a record's lines have less than {MAX_LINE_BYTES}")
        self._left_bytes -= len(line) + 1
        if self._left_bytes < 0:
            return  # every later entry is left out, too, for entries after a gap are of no use
        self._buffer += line
        self._buffer += b"\n"
        if self._flushed_s is None:
            self._flushed_s = now_s
        if now_s - self._flushed_s >= self._flush_every_s or len(self._buffer) >= _MAX_BUFFERED_BYTES:
            self.flush()
            self._flushed_s = now_s

    def flush(self) -> None:
        """Write the lines that have gathered to the operating system."""
        write(self._file, self._buffer, self._path)
        self._buffer.clear()

    def close(self) -> None:
        """Flush, and end the record."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_record(path: Path) -> Record:
    """A machine's record. A torn last line is left out; any other damage is a RecordError that names the line."""
    entries: list[Entry] = []
    decoder = msgspec.json.Decoder(Entry)
    with opened(path) as stream:
        header = _header(path, stream.readline(MAX_LINE_BYTES))
        number = 1
        while line := stream.readline(MAX_LINE_BYTES):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    raise RecordError(
                        f"{path}, line {number} is longer than {MAX_LINE_BYTES} bytes; it is not a record"
                    )
                return Record(header.machine, entries, True, header.node, header.first)
            try:
                entries.append(decoder.decode(line))
            except (RecursionError, msgspec.MsgspecError) as error:
                raise RecordError(f"{path}, line {number} is damaged ({error}); replay up to it at most") from error
    return Record(header.machine, entries, False, header.node, header.first)


def _header(path: Path, line: bytes) -> _Header:
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (RecursionError, msgspec.MsgspecError) as error:
        raise RecordError(f"{path} is not a record of a machine ({error})") from error
    if (header.format, header.version) != (FORMAT, VERSION):
        raise RecordError(f"{path} is {header.format!r} version {header.version}; this program reads version {VERSION}")
    return header


class History(NamedTuple):
    """The entries of a log after the first `begin`. `whole`: no gap and no torn line hides its end."""

    begin: int
    entries: list[Entry]
    whole: bool


def history(records: Sequence[Record], begin: int, lost: Collection[int]) -> History:
    """One shard's history from entry `begin` + 1 on.

    `lost`: nodes that were given up. Entries on lost nodes alone were never acknowledged, unless all copies are lost;
    then the record ends with its last entry. A gap (copies that died with unwritten lines, one after the other) ends
    it, too.
    """
    survivors = [record for record in records if record.node not in lost] or list(records)
    end = max((record.first + len(record.entries) - 1 for record in survivors), default=begin)
    entries: list[Entry] = []
    newest_first = sorted(records, key=lambda record: -record.node)
    for index in range(begin + 1, end + 1):
        entry = _entry(newest_first, index)
        if entry is None:
            return History(begin, entries, whole=False)
        entries.append(entry)
    return History(begin, entries, whole=not any(record.torn for record in survivors))


def _entry(records: Sequence[Record], index: int) -> Entry | None:
    for record in records:
        if 0 <= index - record.first < len(record.entries):
            return record.entries[index - record.first]
    return None
