"""Snapshots of shards on disk: each shard writes its own part, and only whole parts are read.

    folder/
      snapshot-00000012-shard-0.safetensors     the shard's tensors, and its state as one of bytes
      snapshot-00000012-shard-0.json            that file's size and sha256, and its own sha256: written last
      snapshot-00000012-shard-1.…               complete on its own; snapshot 12 is whole when every shard's part is
      snapshot-00000013-shard-0.….partial       being written; a crash leaves it, the shard's next write removes it

A part counts from the moment at which its manifest is renamed; until then the earlier ones are untouched. Size and hash
are checked before anything is parsed; no pickle is read.

Each shard keeps its newest two parts, so the coordinator orders snapshot n + 1 only when all shards have reported n:
then two shards never differ by more than one, and a number that all of them have is always left. One copy of a shard
writes. A restart from snapshot n calls `discard_beyond(n)` first: parts of n + 1 that some shards have belong to the
attempt that is given up, and must not be taken for parts of the n + 1 to come.

A shard's whole state as bytes, for a worker that keeps it: the training state of a loop of one's own.

rank 0 ──AskState──▶ head of each shard       while no worker has a batch in hand
       ◀─StateCopy──
later  a new shard begins with the bytes      the same weights, versions, moments and tickets
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from polytempo.core import Port, TimedOut
from polytempo.core.errors import NotFinite, PolytempoError
from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.server.message import Message
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.disk import Disk, disk_of
from polytempo.server.tensors.optimizer import can_be_native, first_unfinite
from polytempo.server.timing import Timing

FORMAT = "polytempo-shard-snapshot"
VERSION = 3
KEPT = 2
MAX_MANIFEST_BYTES = 4096
_OWN_HASH = "manifest_sha256"

_PART = re.compile(r"snapshot-(\d{8,})-shard-(\d+)\.(safetensors|json)(\.partial)?")
_STATE = "state"
FORGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""Errors of reading a file with right hashes that no program of ours has written."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class SnapshotError(PolytempoError):
    """A snapshot cannot be written, or its files are damaged."""


class OtherVersion(SnapshotError):
    """A whole snapshot is of another version of Polytempo."""


class SnapshotPart(NamedTuple):
    """The state of one shard, as `Shard.dump` returns and `Shard.load` takes it."""

    state: bytes
    tensors: tuple[Tensor, ...]


def write(
    folder: Place, number: int, shard: int, state: bytes, tensors: Sequence[Tensor], disk: Disk | None = None
) -> None:
    """Write `shard`'s part of snapshot `number`; then its newest two parts remain. The tensors must not change.

    Raises SnapshotError where the disk is full or fails; the earlier parts are untouched, and no remains are left.
    Cost: one pass over the bytes, which are hashed as they are written; no copy of the tensors is made.
    """
    if number < 0 or shard < 0:
        raise ValueError(f"snapshots and shards count from 0, got snapshot {number} of shard {shard}")
    contents = _contents(state, tensors)
    disk = disk or disk_of(folder)
    file, manifest = _file(folder, number, shard), _manifest(folder, number, shard)
    remains = [_partial(file), _partial(manifest)]
    try:
        _remove(disk, folder, [name for name, _ in _parts(disk, folder, shard) if name.endswith(".partial")])
        num_bytes, sha256 = _put(disk, file, contents)
        _put(disk, manifest, iter([_encoded(number, shard, num_bytes, sha256)]))
        remains += [manifest, file]
        disk.rename(_partial(file), file)
        disk.rename(_partial(manifest), manifest)
        disk.sync_folder(folder)
    except OSError as error:
        for path in remains:
            with suppress(OSError):
                disk.remove(path)
        raise SnapshotError(
            f"cannot write {file}: {files.problem(error, file)}, or choose another folder. Earlier snapshots are "
            "untouched."
        ) from error
    with suppress(OSError):  # an old part that cannot be removed does no harm; the next write tries again
        _prune(disk, folder, number, shard)


def read(folder: Place, number: int, shard: int, disk: Disk | None = None) -> SnapshotPart:
    """`shard`'s part of snapshot `number`, checked; SnapshotError names the file that is missing or damaged."""
    disk = disk or disk_of(folder)
    file = _file(folder, number, shard)
    num_bytes, sha256 = _read_manifest(disk, _manifest(folder, number, shard), number, shard)
    try:
        found = disk.size(file)
        if found != num_bytes:
            raise SnapshotError(f"{file} has {found} bytes instead of {num_bytes}; restart from an earlier snapshot")
        content = disk.read(file, num_bytes)
    except OSError as error:
        raise SnapshotError(f"{file} cannot be read ({error}); restart from an earlier snapshot") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SnapshotError(f"{file} is damaged (its sha256 is not its manifest's); restart from an earlier snapshot")
    try:
        return unpacked(content)
    except (SafetensorError, *FORGED) as error:
        raise SnapshotError(f"{file} holds no shard's tensors ({error}); restart from an earlier snapshot") from error


def packed(part: SnapshotPart) -> bytes:
    """A part as the bytes of one file, in memory of their own."""
    return b"".join(_contents(*part))


def unpacked(content: bytes) -> SnapshotPart:
    """The argument of `packed`. Raises SafetensorError, and the errors of `FORGED`, for other bytes."""
    named = load(content)
    return SnapshotPart(named.pop(_STATE).numpy().tobytes(), tuple(named[str(i)] for i in range(len(named))))


@contextmanager
def snapshot_errors(folder: Place, number: int, shard: int) -> Iterator[None]:
    """Inside, where a part's content is used, an error becomes a SnapshotError that names the file."""
    try:
        yield
    except (*FORGED, RuntimeError) as error:
        file = _file(folder, number, shard)
        raise SnapshotError(
            f"{file} was not written by a shard ({type(error).__name__}: {error}); restart from an earlier "
            "snapshot, or begin another run"
        ) from error


def complete(folder: Place, number: int, num_shards: int, disk: Disk | None = None) -> bool:
    """True if every shard has finished its part of snapshot `number`. Looks at names only."""
    names = set((disk or disk_of(folder)).names(folder))
    return all(_manifest(folder, number, shard).name in names for shard in range(num_shards))


def begun(folder: Place, number: int, shard: int, disk: Disk | None = None) -> bool:
    """True if a file of `shard`'s part of snapshot `number` is there, even a partial one."""
    return any(other == number for _, other in _parts(disk or disk_of(folder), folder, shard))


def complete_part(folder: Place, number: int, shard: int, disk: Disk | None = None) -> bool:
    """True if `shard` has finished its part of snapshot `number`. Looks at names only."""
    return _manifest(folder, number, shard).name in (disk or disk_of(folder)).names(folder)


def files_of(folder: Place, number: int, num_shards: int) -> list[Place]:
    """The files that snapshot `number` is made of."""
    return [make(folder, number, shard) for shard in range(num_shards) for make in (_file, _manifest)]


def newest_whole(folder: Place, num_shards: int, disk: Disk | None = None, *, before: int | None = None) -> int | None:
    """The newest snapshot with all parts present and undamaged; None without one. Reads all of it.

    `before`: only smaller numbers. OtherVersion where a newer one is of another version.
    """
    disk = disk or disk_of(folder)
    numbers = {number for shard in range(num_shards) for _, number in _parts(disk, folder, shard)}
    for number in sorted((n for n in numbers if before is None or n < before), reverse=True):
        try:
            for shard in range(num_shards):
                read(folder, number, shard, disk)
            return number
        except OtherVersion:
            raise
        except SnapshotError:
            continue
    return None


def discard_beyond(folder: Place, number: int | None, disk: Disk | None = None) -> None:
    """Remove all parts of snapshots after `number`, None: of all. For a restart from it, before anything is written."""
    disk = disk or disk_of(folder)
    for name in disk.names(folder):
        match = _PART.fullmatch(name)
        if match and (number is None or int(match[1]) > number):
            disk.remove(folder / name)
    if disk.names(folder):
        disk.sync_folder(folder)


# ---------------------------------------------------------------------------------------------------------- the files


def check_finite(shard: int, tensors: Sequence[Tensor]) -> None:
    """Raise NotFinite where a tensor of `shard` holds NaN or an infinity. Reads each once."""
    for number, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1)
        bad = first_unfinite(flat, can_be_native(flat.dtype)) if flat.is_floating_point() and flat.numel() else -1
        if bad >= 0:
            what = "its weights" if number == 0 else f"tensor {number} of its state"
            advice = "so this snapshot is not written, and the earlier ones stay"
            raise NotFinite("", bad, float(flat[bad]), f"shard {shard}, {what}", advice=advice)


def _file(folder: Place, number: int, shard: int) -> Place:
    return folder / f"snapshot-{number:08d}-shard-{shard}.safetensors"


def _manifest(folder: Place, number: int, shard: int) -> Place:
    return folder / f"snapshot-{number:08d}-shard-{shard}.json"


def _partial(path: Place) -> Place:
    return path.with_name(path.name + ".partial")


def _parts(disk: Disk, folder: Place, shard: int) -> list[tuple[str, int]]:
    """A shard's files, with the number of the snapshot that each belongs to."""
    matches = [match for name in disk.names(folder) if (match := _PART.fullmatch(name))]
    return [(match[0], int(match[1])) for match in matches if int(match[2]) == shard]


def _put(disk: Disk, path: Place, contents: Iterator[bytes | memoryview]) -> tuple[int, str]:
    """Write the file aside and flush it; its size and sha256."""
    num_bytes, digest = 0, hashlib.sha256()
    with disk.create(_partial(path)) as writer:
        for content in contents:
            writer.write(content)
            digest.update(content)
            num_bytes += len(content)
        writer.sync()
    return num_bytes, digest.hexdigest()


def _prune(disk: Disk, folder: Place, number: int, shard: int) -> None:
    """Remove old parts, each manifest before its tensors, so that half a part is never taken for one."""
    parts = _parts(disk, folder, shard)
    complete = sorted({other for name, other in parts if name.endswith(".json") and other <= number}, reverse=True)
    oldest_kept = complete[:KEPT][-1]
    _remove(disk, folder, sorted(name for name, other in parts if other < oldest_kept))


def _remove(disk: Disk, folder: Place, names: Sequence[str]) -> None:
    for name in names:
        disk.remove(folder / name)


# -------------------------------------------------------------------------------------------------------- the contents


def _contents(state: bytes, tensors: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file piece by piece: 8 bytes of header length, the header, each tensor's bytes."""
    plain = [tensor.detach().cpu().contiguous() for tensor in tensors]
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape, num_bytes in [
        *((str(i), _dtype_name(tensor), list(tensor.shape), tensor.nbytes) for i, tensor in enumerate(plain)),
        (_STATE, "U8", [len(state)], len(state)),
    ]:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return iter([start, *(memoryview(tensor.view(-1).view(torch.uint8).numpy().data) for tensor in plain), state])


def _dtype_name(tensor: Tensor) -> str:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"a snapshot cannot hold {tensor.dtype}; it holds {', '.join(map(str, _DTYPES))}")
    return _DTYPES[tensor.dtype]


def _encoded(number: int, shard: int, num_bytes: int, sha256: str) -> bytes:
    """The manifest as JSON with one spelling for each content, its own sha256 last."""
    body: dict[str, Any] = {"format": FORMAT, "version": VERSION, "number": number, "shard": shard}
    return _signed(body | {"num_bytes": num_bytes, "sha256": sha256})


def _signed(body: dict[str, Any]) -> bytes:
    own = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, _OWN_HASH: own}).encode() + b"\n"


def _read_manifest(disk: Disk, path: Place, number: int, shard: int) -> tuple[int, str]:
    """The size and hash of the part's file."""
    try:
        content = disk.read(path, MAX_MANIFEST_BYTES)
        document = json.loads(content)
        num_bytes, sha256 = int(document["num_bytes"]), str(document["sha256"])
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read ({error}); the snapshot was never completed") from error
    except FORGED as error:
        raise SnapshotError(f"{path} is damaged ({type(error).__name__}); restart from an earlier snapshot") from error
    version = document.get("version")
    is_another = type(version) is int and version != VERSION and version > 0
    if is_another and content == _signed({name: document[name] for name in document if name != _OWN_HASH}):
        raise OtherVersion(
            f"{path} is of version {version!r} of snapshots, and this program reads version {VERSION}; go on with the "
            "program that saved it, or begin another run in another folder"
        )
    if content != _encoded(number, shard, num_bytes, sha256):
        raise SnapshotError(f"{path} is damaged or of another version; restart from an earlier snapshot")
    return num_bytes, sha256


class AskState(Message, frozen=True, eq=False):
    """Request to a shard's head: send your state."""

    shard: int


class StateCopy(Message, frozen=True, eq=False):
    """The answer, once every copy has all of it; see `packed`."""

    shard: int
    content: Tensor
    """As uint8: the result of `packed`."""


def copy_of(shard: Shard) -> StateCopy:
    """The state of `shard` as it is now."""
    return StateCopy(shard.number, torch.frombuffer(bytearray(packed(SnapshotPart(*shard.dump()))), dtype=torch.uint8))


def begin_with(shard: Shard, content: bytes) -> None:
    """Become the shard that `content` is of. ValueError where it is of another one."""
    try:
        found = unpacked(content)
        shard.load(found.state, found.tensors)
    except (SafetensorError, RuntimeError, *FORGED) as error:
        raise ValueError(
            f"the training state does not fit shard {shard.number} of this run ({type(error).__name__}: {error}); load "
            "one saved by a loop with the same model, stages and strategy"
        ) from error


async def states_of(port: Port, heads: Sequence[int], timing: Timing) -> list[Tensor]:
    """The states of all shards, from the heads on these nodes. TimedOut where one does not answer."""
    found: dict[int, Tensor] = {}
    until_s = await port.now() + timing.deadline_s
    while len(found) < len(heads):
        for shard, head in enumerate(heads):
            if shard not in found:
                await port.post(AskState(shard), head)
        again_s = await port.now() + timing.retry_s
        while len(found) < len(heads) and (left_s := again_s - await port.now()) > 0:
            taken = await port.take(left_s)
            if taken is not None and isinstance(taken[1], StateCopy):
                found[taken[1].shard] = taken[1].content.clone()
        if await port.now() > until_s:
            missing = sorted(set(range(len(heads))) - set(found))
            raise TimedOut(port.world_rank, None, f"the state of shards {missing}", timing.deadline_s)
    return [found[shard] for shard in range(len(heads))]


class WrittenSnapshot(NamedTuple):
    """The outcome of writing snapshot `number`; `error` is "" where it is on the disk."""

    number: int
    error: str = ""
    not_finite: NotFinite | None = None
    """The error where it was left out for a value that is NaN or infinite."""


@final
class SnapshotWriter:
    """One shard's writer. At most one snapshot is under way; the calling process never waits for the disk.

        if writer.begin(12, *shard.dump()): …         # later, now and then:
        saved = writer.poll()                         # None, WrittenSnapshot(12), or with an error

    A snapshot that is begun while another is under way is refused (False): the coordinator asks again after the first
    is reported. The thread ends with the process; it may leave a partial file, never half a snapshot.
    """

    def __init__(self, folder: Place, shard: int, disk: Disk | None = None) -> None:
        self._folder, self._shard, self._disk = folder, shard, disk
        self._thread: threading.Thread | None = None
        self._saved: WrittenSnapshot | None = None

    def begin(self, number: int, state: bytes, tensors: Sequence[Tensor]) -> bool:
        """Write in the background; the tensors must not change any more. False if one is under way or unpolled."""
        if self._thread is not None:
            return False
        self._thread = threading.Thread(
            target=self._write, args=(number, state, tuple(tensors)), name=f"snapshot-{number}", daemon=True
        )
        self._thread.start()
        return True

    def poll(self) -> WrittenSnapshot | None:
        """The outcome of the snapshot that was begun, once; None while it is under way, or none was begun."""
        if self._thread is None or self._thread.is_alive():
            return None
        return self._take()

    def close(self, timeout_s: float) -> WrittenSnapshot | None:
        """Wait until the disk has the snapshot under way. As `poll`, but TimeoutError if it takes longer."""
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"shard {self._shard}'s snapshot was not written within {timeout_s:g} s; is the disk slow?"
            )
        return self._take()

    def _take(self) -> WrittenSnapshot | None:
        saved, self._saved, self._thread = self._saved, None, None
        return saved

    def _write(self, number: int, state: bytes, tensors: tuple[Tensor, ...]) -> None:
        try:
            check_finite(self._shard, tensors)  # else it would take the place of a good one
            write(self._folder, number, self._shard, state, tensors, self._disk)
            self._saved = WrittenSnapshot(number)
        except NotFinite as error:
            self._saved = WrittenSnapshot(number, str(error), error)
        except (SnapshotError, ValueError) as error:
            self._saved = WrittenSnapshot(number, str(error))
        except BaseException as error:
            self._saved = WrittenSnapshot(number, f"{type(error).__name__}: {error}")
            raise
