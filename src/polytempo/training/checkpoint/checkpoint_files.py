"""Checkpoints: one safetensors file a rank and a manifest of hashes, written aside and moved into place.

    checkpoint/
      step-00000100/            complete: renamed into place only after everything in it was on the disk
        rank-0.safetensors      this rank's tensors; its scalars as one JSON string in the metadata
        rank-1.safetensors
        manifest.json           every file's size, sha256 and place in the mesh, and its own sha256
      .step-00000120.partial/   being written (see `checkpoint_folders` for all names)

Pure file work: nothing communicates, and no link is followed (see `core.system.files`). Every rank calls `write_part`;
rank 0 then calls `commit` with the hashes of all ranks. Nothing is parsed before its size and hash are checked, and
nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polytempo.core import Mesh
from polytempo.core.state import Scalar
from polytempo.core.system import files
from polytempo.core.system.descriptors import open_descriptor
from polytempo.core.system.scratch_folder import ScratchFolder
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.training.checkpoint.checkpoint_folders import (
    SERVED_MODEL,
    CheckpointError,
    DamagedCheckpoint,
    complete_in,
    damaged,
    final_folder,
    make_partial,
    move_into_place,
    partial_folder,
    prune,
    set_aside,
    still_there,
)
from polytempo.training.checkpoint.checkpoint_objects import (
    fetched,
    object_name,
    object_of,
    put_manifest,
    put_part,
    stored,
)
from polytempo.training.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    PartFile,
    along_data,
    decoded,
    encoded,
    part_name,
    scalars_of,
)

MAX_HEADER_BYTES = 100 * 1024 * 1024

_FORGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""Errors of reading a file that another program wrote, though its hashes are right."""


class ForeignCheckpoint(CheckpointError, ValueError):
    """A checkpoint is whole, and not of this model, optimizer or strategy."""


@dataclass(frozen=True)
class CheckpointPart:
    """One rank's part of a checkpoint: tensors of any shape and dtype, and plain values, by name."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Scalar]


def write_part(root: Place, step: int, rank: int, part: CheckpointPart) -> str:
    """Write one rank's file aside, flushed to the disk. Returns its sha256, which `commit` needs.

    Tensors may share memory, be views, or live on another device: each is saved as a copy of its own. A caller
    has looked for NaN and infinities (`checkpoint_writer.written_part`).
    """
    _check_names(part)
    tensors = {name: _own(tensor) for name, tensor in part.tensors.items()}
    metadata = {"scalars": json.dumps(part.scalars)}
    if isinstance(root, UrlPath):
        return _put(final_folder(root, step), rank, tensors, metadata)
    folder = partial_folder(root, step)
    file = folder / part_name(rank)
    try:
        make_partial(folder)
        files.create(file).close()  # a link of that name would be followed
        save_file(tensors, file, metadata=metadata)
        _sync(file)
        return _sha256(file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            file.unlink()
        raise CheckpointError(
            f"cannot write {file}: {files.problem(error, file)}, or choose another folder. {still_there(root)}"
        ) from error


def commit(
    root: Place, step: int, hashes: Sequence[str], about: Mapping[str, Scalar], mesh: Mesh | None = None
) -> Place:
    """Make the parts of `step` (one hash per rank) the newest checkpoint. Rank 0 calls it when all parts are written.

    `mesh`: the ranks' layout; without one, all are along "data".

    Until the rename the previous checkpoint is the newest, from then on this one: there is no state in between.
    Afterwards the newest two remain. Complete checkpoints beyond `step` belong to a run that was given up, and go too;
    parts beyond it stay, because a rank that is ahead may be writing them.
    """
    final = final_folder(root, step)
    folder = final if isinstance(final, UrlPath) else partial_folder(root, step)
    parts = [_finished_part(folder, rank, sha256) for rank, sha256 in enumerate(hashes)]
    mesh = mesh or along_data(len(parts))
    if mesh.size != len(parts):
        raise ValueError(f"a {mesh} has {mesh.size} ranks, and {len(parts)} have written; pass a hash for each rank")
    content = encoded(Manifest(step, tuple(parts), dict(about), mesh))
    try:
        if isinstance(final, UrlPath):
            put_manifest(final, content, hashes)
        else:
            assert isinstance(folder, Path)
            _complete_folder(folder, final, content, {part.name for part in parts})
    except OSError as error:
        raise CheckpointError(f"cannot complete the checkpoint {final}: {error}. {still_there(root)}") from error
    prune(root, step)
    files.remove(root / SERVED_MODEL)  # snapshots that an earlier run has left here are not this run's
    return final


def _complete_folder(folder: Path, final: Path, manifest: bytes, parts: set[str]) -> None:
    for stray in set(os.listdir(folder)) - parts:
        files.remove(folder / stray)
    with files.create(folder / MANIFEST) as stream:
        stream.write(manifest)
    _sync(folder / MANIFEST)
    _sync(folder)
    move_into_place(folder, final)
    _sync(final.parent)
    _sync(final.parent.parent)


def read_manifest(path: Place) -> Manifest:
    """The manifest of the checkpoint in folder `path`, checked against its own hash."""
    file = path / MANIFEST
    try:
        content = files.read(file, MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise damaged(path, file, f"cannot be read ({error.strerror})") from error
    if len(content) > MAX_MANIFEST_BYTES:
        raise damaged(path, file, f"is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        return decoded(content)
    except _FORGED as error:
        raise damaged(path, file, f"is damaged ({type(error).__name__}: {error})") from error


def read_part(path: Place, rank: int) -> CheckpointPart:
    """The part of `rank` in the checkpoint folder `path`, on the CPU. Checks size and sha256 before parsing."""
    parts = read_manifest(path).parts
    if not 0 <= rank < len(parts):
        raise ValueError(f"{path} holds the ranks 0 to {len(parts) - 1}; there is no rank {rank}")
    expected = parts[rank]
    named: Place = path / expected.name
    try:
        with _undamaged(path, expected) as file, safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
            return CheckpointPart(tensors, scalars_of(opened.metadata()))
    except OSError as error:
        raise damaged(path, named, f"cannot be read ({error.strerror})") from error
    except (SafetensorError, *_FORGED) as error:
        raise damaged(path, named, f"is not a rank's file ({type(error).__name__}: {error})") from error


def newest_undamaged(root: Place) -> Place | None:
    """The newest checkpoint in `root` that is as it was written; None where there is none.

    Newer, damaged checkpoints are set aside, and standard error names them. CheckpointError if all are damaged: then
    they stay. Cost: reads all of it; under a URL its manifest and the sizes of its parts.
    """
    harmed: list[tuple[Place, DamagedCheckpoint]] = []
    for _, folder in sorted(complete_in(root).items(), reverse=True):
        try:
            for part in read_manifest(folder).parts:
                _check(folder, part)
        except DamagedCheckpoint as error:
            harmed.append((folder, error))
            continue
        for other, why in harmed:
            print(f"note: {why.problem}: {other} is set aside as {set_aside(other)}", file=sys.stderr)
        return folder
    if harmed:
        raise harmed[0][1]
    return None


def go_on_from(out: Place) -> None:
    """Set damaged checkpoints aside before a run in `out` is resumed, and print the name of the next one."""
    if (folder := newest_undamaged(out / "checkpoint")) is not None:
        print(f"polytempo: goes on from step {read_manifest(folder).step:,}, saved in {folder}", file=sys.stderr)


def _check(path: Place, part: PartFile) -> None:
    named: Place = path / part.name
    try:
        if isinstance(path, UrlPath):
            found = stored(path, part).size()
            if found != part.num_bytes:
                raise damaged(path, named, f"has {found} bytes instead of {part.num_bytes}")
            return
        with _undamaged(path, part):
            pass
    except OSError as error:
        raise damaged(path, named, f"cannot be read ({error.strerror})") from error


@contextmanager
def _undamaged(path: Place, part: PartFile) -> Iterator[Path]:
    """A part as a local file with the right size and hash."""
    with _local(path, part) as file:
        num_bytes, named = _size(file), path / part.name
        if num_bytes != part.num_bytes:
            raise damaged(path, named, f"has {num_bytes} bytes instead of {part.num_bytes}")
        if _sha256(file) != part.sha256:
            raise damaged(path, named, "is damaged (its sha256 is not the manifest's)")
        yield file


@contextmanager
def _local(path: Place, part: PartFile) -> Iterator[Path]:
    """A part as a local file. A folder that was copied here from a URL has parts that are named by their content."""
    if isinstance(path, UrlPath):
        with fetched(path, part) as copy:
            yield copy
        return
    by_content = object_of(path, part)
    assert isinstance(by_content, Path)
    yield by_content if by_content.is_file() and not os.path.lexists(path / part.name) else path / part.name


def _put(folder: UrlPath, rank: int, tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    try:
        with ScratchFolder() as scratch:
            file = scratch.path / part_name(rank)
            files.create(file).close()
            save_file(tensors, file, metadata=metadata)
            sha256 = _sha256(file)
            put_part(folder, rank, file, sha256)
            return sha256
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write to {folder}: {error}. {still_there(folder.parent)}") from error


def _check_names(part: CheckpointPart) -> None:
    for name, value in part.scalars.items():
        if value is not None and not isinstance(value, (int, float, str)):
            raise ValueError(f"scalar {name!r} is a {type(value).__name__}; put a tensor into `tensors` instead")
    if "__metadata__" in part.tensors:
        raise ValueError("a tensor cannot be named '__metadata__': safetensors keeps that name for itself")


def _own(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


def _finished_part(folder: Place, rank: int, sha256: str) -> PartFile:
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"{sha256!r} is not a sha256; pass the answers of write_part, in the order of ranks")
    file: Place = folder / (object_name(rank, sha256) if isinstance(folder, UrlPath) else part_name(rank))
    try:
        if isinstance(file, UrlPath):
            return PartFile(part_name(rank), file.size(), sha256)
        num_bytes, declared = _size(file), _declared_bytes(file)
    except (OSError, *_FORGED) as error:
        raise CheckpointError(f"{file} is missing or unreadable; all ranks must write to one shared folder") from error
    if num_bytes != declared:
        raise CheckpointError(f"{file} has {num_bytes} bytes instead of {declared}; was the disk full?")
    return PartFile(file.name, num_bytes, sha256)


def _declared_bytes(file: Path) -> int:
    """The length of a safetensors file: 8 bytes of header length, the header, the data that the header lists."""
    with files.opened(file) as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {header_bytes} bytes")
        header = json.loads(stream.read(header_bytes))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + header_bytes + max(ends, default=0)


def _sync(path: Path) -> None:
    descriptor = open_descriptor(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(file: Path) -> int:
    with files.opened(file) as stream:
        return os.fstat(stream.fileno()).st_size


def _sha256(file: Path) -> str:
    with files.opened(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
