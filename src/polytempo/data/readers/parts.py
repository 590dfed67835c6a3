"""A data set in parts: .npy files in a folder of any file system, which many processes write, and an index.

    folder/index.json                {"version": 1, "parts": [{"rows": …, "kind": …, "inputs": {…}, "targets": {…}}, …]}
          /part-00000-….inputs.npy   (rows, …)     each with its SHA-256 in the index
          /part-00000-….targets.npy  (rows,)

The index is written last: a folder without one is not finished. Files that it does not name belong to no data set.
Folders are paths, or URLs of fsspec: "s3://bucket/digits", "memory://digits".
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy
import torch
from torch.utils.data import TensorDataset

INDEX = "index.json"
VERSION = 1
MAX_INDEX_BYTES = 64 << 20
ROWS_PER_PART = 1 << 16

Entry = Mapping[str, Any]
"""One part, as the index has it."""


class PartWriter:
    """Writes rows as parts of at most `rows_per_part`; holds no more in memory.

    `prefix` keeps writers apart: a task that is tried again, or in two places, has another one each time.
    """

    def __init__(self, folder: str, prefix: str, rows_per_part: int = ROWS_PER_PART) -> None:
        if rows_per_part < 1:
            raise ValueError(f"rows_per_part is {rows_per_part}; it must be at least 1")
        self._folder, self._prefix, self._most = folder, prefix, rows_per_part
        self._held: list[tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]] = []
        self._num_held = 0
        self._written: list[Entry] = []

    def add(self, inputs: numpy.ndarray[Any, Any], targets: numpy.ndarray[Any, Any]) -> None:
        """Add rows: inputs (N, …) and targets (N, …)."""
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets; each row has both")
        while len(inputs):
            taken = min(len(inputs), self._most - self._num_held)
            self._held.append((inputs[:taken], targets[:taken]))
            self._num_held += taken
            inputs, targets = inputs[taken:], targets[taken:]
            if self._num_held == self._most:
                self._flush()

    def finish(self) -> list[Entry]:
        """Write the held samples; the entries of all parts, for `write_index`."""
        if self._num_held:
            self._flush()
        return self._written

    def _flush(self) -> None:
        name = f"{self._prefix}-{len(self._written):05d}"
        columns = zip(*self._held, strict=True)
        inputs, targets = (numpy.concatenate(column) for column in columns)
        files = {"inputs": self._write(f"{name}.inputs", inputs), "targets": self._write(f"{name}.targets", targets)}
        kind = ", ".join(f"{array.dtype}{list(array.shape[1:])}" for array in (inputs, targets))
        self._written.append({"rows": self._num_held, "kind": kind, **files})
        self._held, self._num_held = [], 0

    def _write(self, name: str, array: numpy.ndarray[Any, Any]) -> dict[str, str]:
        stream = io.BytesIO()
        numpy.save(stream, array, allow_pickle=False)
        content = stream.getvalue()
        with fsspec.open(_joined(self._folder, f"{name}.npy"), "wb") as file:
            file.write(content)
        return {"name": f"{name}.npy", "sha256": hashlib.sha256(content).hexdigest()}


def start_folder(folder: str | Path) -> str:
    """Make the folder, with its whole name. ValueError where it holds a data set already."""
    files, path = fsspec.core.url_to_fs(str(folder))
    if files.exists(f"{path}/{INDEX}"):
        raise ValueError(f"{folder} holds a data set already; name another folder, or remove it")
    files.makedirs(path, exist_ok=True)
    return str(files.unstrip_protocol(path))


def write_index(folder: str, entries: Iterable[Entry]) -> None:
    """Finish the data set: it has these parts, in this order. ValueError where it has no row, or they do not fit."""
    listed = list(entries)
    if not listed:
        raise ValueError(f"{folder} would be a data set without rows")
    _check_kinds(folder, listed)
    with fsspec.open(_joined(folder, INDEX), "wb") as file:
        file.write(json.dumps({"version": VERSION, "parts": listed}).encode())


def read_parts(folder: str | Path) -> TensorDataset:
    """The data set in `folder` as tensors in memory: inputs (N, …) and targets (N, …), in the order of the index.

        job = pt.Job(data=lambda path: pt.Data(pt.data.read_parts("s3://bucket/digits")), …)

    Each file's SHA-256 is checked before it is parsed. Raises ValueError where a file is missing or changed, or where
    parts do not fit each other. Cost: one copy of the data in each process.
    """
    place = str(folder)
    entries = _read_index(place)
    _check_kinds(place, entries)
    inputs = [_read(place, entry, "inputs") for entry in entries]
    targets = [_read(place, entry, "targets") for entry in entries]
    return TensorDataset(*(torch.from_numpy(numpy.concatenate(arrays)) for arrays in (inputs, targets)))


def _check_kinds(folder: str, entries: Iterable[Entry]) -> None:
    if len(kinds := sorted({str(entry["kind"]) for entry in entries})) > 1:
        raise ValueError(f"{folder}: rows have inputs and targets of different types or shapes: {'; '.join(kinds)}")


def _read_index(folder: str) -> list[Entry]:
    try:
        with fsspec.open(_joined(folder, INDEX), "rb") as file:
            content = file.read(MAX_INDEX_BYTES + 1)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no {INDEX}: it is not a data set in parts, or its writer has not ended"
        ) from None
    if len(content) > MAX_INDEX_BYTES:
        raise ValueError(f"{folder}/{INDEX} has more than {MAX_INDEX_BYTES:,} bytes")
    try:
        index = json.loads(content)
        version, entries = index["version"], index["parts"]
        fitting = all(set(each) == {"rows", "kind", "inputs", "targets"} for each in entries) and len(entries) > 0
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{folder}/{INDEX} is not an index of parts") from None
    if version != VERSION or not fitting:
        raise ValueError(f"{folder}/{INDEX} is not an index of parts of version {VERSION}")
    found: list[Entry] = entries
    return found


def _read(folder: str, entry: Entry, kind: str) -> numpy.ndarray[Any, Any]:
    name, expected = entry[kind]["name"], entry[kind]["sha256"]
    if "/" in name or "\\" in name or not name.endswith(".npy"):
        raise ValueError(f"{folder}/{INDEX} names {name!r}, which is not a file of that folder")
    try:
        with fsspec.open(_joined(folder, name), "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise ValueError(f"{folder} lacks {name}, which its index names") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise ValueError(f"{folder}/{name} is not the written file: its SHA-256 differs")
    array: numpy.ndarray[Any, Any] = numpy.load(io.BytesIO(content), allow_pickle=False)
    if len(array) != entry["rows"]:
        raise ValueError(f"{folder}/{name} has {len(array)} rows, and the index says {entry['rows']}")
    return array


def _joined(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"
