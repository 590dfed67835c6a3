"""Checkpoints where nothing is renamed: in an object store, or any other filesystem that a URL names.

    checkpoint/step-00000100/
      rank-0.3f2ac41b09d7e865.safetensors     named by its sha256, so a named part is never written again
      manifest.json                           put last: from then on the checkpoint is complete

A step that is saved again puts parts of other names beside the old ones, and then its manifest in the old one's place.
So a complete checkpoint stays as it was, after any write. Parts and manifests hold the same bytes as in a local folder.
On a filesystem that is not an object store a manifest may be cut short; it counts as none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from polytempo.core.system.scratch_folder import ScratchFolder
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.training.checkpoint.manifest import (
    COMPLETE,
    KEPT,
    LEFTOVER,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    PartFile,
    decoded,
    part_name,
)

_HASH_DIGITS = 16
_END = b"}\n"


def object_name(rank: int, sha256: str) -> str:
    """The name of a rank's part by its content."""
    plain = Path(part_name(rank))
    return f"{plain.stem}.{sha256[:_HASH_DIGITS]}{plain.suffix}"


def object_of(folder: Place, part: PartFile) -> Place:
    """The place of a part that a manifest names, in a folder with parts named by their content."""
    return folder / object_name(int(Path(part.name).stem.removeprefix("rank-")), part.sha256)


def put_part(folder: UrlPath, rank: int, file: Path, sha256: str) -> None:
    """Put the part that the local `file` holds. OSError where fewer bytes arrived."""
    part = folder / object_name(rank, sha256)
    part.upload(file)
    arrived, sent = part.size(), file.stat().st_size
    if arrived != sent:
        raise OSError(f"{part} has {arrived} bytes, and {sent} were sent")


def put_manifest(folder: UrlPath, content: bytes, hashes: Sequence[str]) -> None:
    """Make the parts in `folder` a checkpoint, and remove leftovers of earlier tries at this step."""
    (folder / MANIFEST).write(content)
    _keep_only(folder, hashes)


def stored(folder: UrlPath, part: PartFile) -> UrlPath:
    """The object that a part is."""
    source = folder / object_name(int(Path(part.name).stem.removeprefix("rank-")), part.sha256)
    return source if source.exists() else folder / part.name  # copied here from a local run


@contextmanager
def fetched(folder: UrlPath, part: PartFile) -> Iterator[Path]:
    """A local copy of a part. OSError where it has another size, before it is copied."""
    source = stored(folder, part)
    with ScratchFolder() as scratch:
        copy = scratch.path / part.name
        if source.size() == part.num_bytes:  # else the caller reports the difference, without a copy
            source.download(copy)
        else:
            copy.write_bytes(b"")
        yield copy


def complete_steps(root: UrlPath) -> dict[int, UrlPath]:
    """The folders of complete checkpoints by step."""
    found = {int(match[1]): root / name for name in root.names() if (match := COMPLETE.fullmatch(name))}
    return {step: folder for step, folder in found.items() if _is_complete(folder)}


def prune_objects(root: UrlPath, step: int) -> None:
    """Remove leftovers and old checkpoints after the complete checkpoint `step`. A manifest goes before its parts."""
    complete = complete_steps(root)
    kept = sorted((other for other in complete if other <= step), reverse=True)[:KEPT]
    for name in root.names():
        match, leftover = COMPLETE.fullmatch(name), LEFTOVER.fullmatch(name)
        number = int(match[1]) if match else step
        given_up = match and number not in kept and (number < step or number in complete)
        if given_up or (leftover and int(leftover[1]) <= step):
            with suppress(OSError):
                (root / name / MANIFEST).remove()
                (root / name).remove()
        elif number in kept[1:]:  # leftovers of saving it again
            with suppress(OSError, ValueError):
                manifest = decoded((root / name / MANIFEST).read(MAX_MANIFEST_BYTES))
                _keep_only(root / name, [part.sha256 for part in manifest.parts])


def _keep_only(folder: UrlPath, hashes: Sequence[str]) -> None:
    kept = {MANIFEST, *(object_name(rank, sha256) for rank, sha256 in enumerate(hashes))}
    kept |= {part_name(rank) for rank in range(len(hashes))}  # of a checkpoint that a local run has written
    with suppress(OSError):  # a leftover does no harm
        for name in folder.names():
            if name not in kept:
                (folder / name).remove()


def _is_complete(folder: UrlPath) -> bool:
    try:
        content = (folder / MANIFEST).read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        return False
    return len(content) > MAX_MANIFEST_BYTES or content.endswith(_END)
