"""`Manifest`: the contents of a checkpoint, as one JSON text.

    {"format": "polytempo-checkpoint", "version": 2, "step": 100,
     "mesh": {"data": 2, "model": 2},
     "parts": [{"name": "rank-0.safetensors", "num_bytes": 8, "sha256": …, "coordinates": {"data": 0, "model": 0}}, …],
     "about": {"strategy": "sync_sgd()", …},
     "sha256": "…"}                                             of all that stands before it

Version 1 has neither mesh nor coordinates: all its ranks are along "data".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from polytempo.core import Mesh
from polytempo.core.state import Scalar

FORMAT = "polytempo-checkpoint"
VERSION = 2
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MANIFEST = "manifest.json"
KEPT = 2
COMPLETE = re.compile(r"step-(\d{8,})")
"""The name of a checkpoint's folder."""
BY_CONTENT = re.compile(r"rank-\d+\.[0-9a-f]{16}\.safetensors")
"""The name of a part by its content (see `checkpoint_objects`)."""
_MOST = 1 << 63
LEFTOVER = re.compile(r"\.step-(\d{8,})\.(partial|replaced|removed)")
"""Names of folders that are not complete checkpoints, or not any more."""


class PartFile(NamedTuple):
    """A rank's file as the manifest describes it."""

    name: str
    num_bytes: int
    sha256: str


class Manifest(NamedTuple):
    """The contents of a checkpoint: its step, one file a rank in the order of ranks, and the writer's own notes."""

    step: int
    parts: tuple[PartFile, ...]
    about: dict[str, Scalar]
    mesh: Mesh


def part_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}.safetensors"


def along_data(size: int) -> Mesh:
    """The mesh of ranks that all hold the same parameters."""
    return Mesh((("data", size),))


def encoded(manifest: Manifest, version: int = VERSION) -> bytes:
    """The manifest's text, its own sha256 last. Raises ValueError where its notes are too long."""
    parts, layout = [part._asdict() for part in manifest.parts], {}
    if version > 1:
        parts = [part | {"coordinates": manifest.mesh.coordinates(rank)} for rank, part in enumerate(parts)]
        layout = {"mesh": manifest.mesh.lengths}
    body = {
        "format": FORMAT,
        "version": version,
        "step": manifest.step,
        **layout,
        "parts": parts,
        "about": manifest.about,
    }
    sha256 = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    content = json.dumps({**body, "sha256": sha256}, indent=1).encode() + b"\n"
    if len(content) > MAX_MANIFEST_BYTES:
        raise ValueError(f"the manifest has {len(content)} bytes, the most is {MAX_MANIFEST_BYTES}; shorten `about`")
    return content


def decoded(content: bytes) -> Manifest:
    """The manifest of a text that `encoded` wrote; ValueError, KeyError, TypeError, … for any other."""
    document: dict[str, Any] = json.loads(content)
    version = document["version"]
    if document["format"] != FORMAT or type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(f"format {document['format']!r} version {version!r}, not {FORMAT!r} 1 to {VERSION}")
    entries = [{key: value for key, value in entry.items() if key != "coordinates"} for entry in document["parts"]]
    parts = tuple(PartFile(**entry) for entry in entries)
    if type(document["step"]) is not int or any([*map(type, part)] != [str, int, str] for part in parts):
        raise ValueError("a step, a size or a hash that is none")
    if not all(0 <= number < _MOST for number in (document["step"], *(part.num_bytes for part in parts))):
        raise ValueError("a step or a size that is negative or beyond 64 bits")
    if not parts:
        raise ValueError("no part of any rank")
    if [part.name for part in parts] != [part_name(rank) for rank in range(len(parts))]:
        raise ValueError("the parts are not one a rank, in order")
    mesh = along_data(len(parts)) if version == 1 else Mesh(tuple(document["mesh"].items()))
    if mesh.size != len(parts):
        raise ValueError(f"{len(parts)} parts of a {mesh}")
    manifest = Manifest(document["step"], parts, checked_scalars(document["about"]), mesh)
    if encoded(manifest, version) != content:
        raise ValueError("it does not match its own sha256")
    return manifest


def checked_scalars(found: Any) -> dict[str, Scalar]:
    """The scalars, or ValueError for other values than a dictionary of plain ones."""
    if not isinstance(found, dict) or any(isinstance(value, list | dict) for value in found.values()):
        raise ValueError("no scalars by name")
    return found


def scalars_of(metadata: Mapping[str, str]) -> dict[str, Scalar]:
    """The scalars in the metadata of a rank's file."""
    return checked_scalars(json.loads(metadata["scalars"]))
