"""LIBSVM text: `<label> <index>:<value> <index>:<value> ...` a line, indices from 1, rising."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from polytempo.data.readers import Split

MAX_BYTES = 4 << 30


class Sparse(NamedTuple):
    """The entries of a file: `values[k]` stands in row `rows[k]` and column `columns[k]` (from 0)."""

    labels: list[float]
    rows: list[int]
    columns: list[int]
    values: list[float]


def libsvm(train: Path, test: Path, num_features: int | None = None) -> Split:
    """Two LIBSVM files as dense float32 (N, num_features) and labels (N,).

    `num_features` is the highest index of both where it is not given. Labels -1/+1 or 0/1 become int64
    0/1; others stay numbers, float32.
    """
    parts = read_sparse(train), read_sparse(test)
    highest = max(max(part.columns, default=0) + 1 for part in parts)
    width = highest if num_features is None else num_features
    if highest > width:
        raise ValueError(f"{train} and {test} have an index of {highest}, but num_features is {width}")
    two_classes = any({*parts[0].labels, *parts[1].labels} <= pair for pair in ({-1.0, 1.0}, {0.0, 1.0}))
    dense = [_dense(part, width, path) for part, path in zip(parts, (train, test), strict=True)]
    return Split(*(TensorDataset(x, _labels(part, two_classes)) for x, part in zip(dense, parts, strict=True)))


def read_sparse(path: Path) -> Sparse:
    """The entries of a LIBSVM file. Errors name the file and the line."""
    found = Sparse([], [], [], [])
    with path.open(encoding="ascii", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            words = line.partition("#")[0].split()
            if words:
                try:
                    _append(found, words)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
    if not found.labels:
        raise ValueError(f"{path} has no rows; expected lines like '+1 3:1 11:0.5'")
    return found


def _append(found: Sparse, words: list[str]) -> None:
    row, last = len(found.labels), 0
    found.labels.append(_number(words[0]))
    for word in words[1:]:
        index, colon, value = word.partition(":")
        if not colon or not index.isdigit():
            raise ValueError(f"{word!r} is not <index>:<value>")
        place = int(index)
        if place <= last:
            raise ValueError(f"index {place} follows {last}; indices begin at 1 and rise")
        last = place
        found.rows.append(row)
        found.columns.append(place - 1)
        found.values.append(_number(value))


def _number(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word!r} is not a finite number")
    return value


def _dense(part: Sparse, num_features: int, path: Path) -> Tensor:
    num_bytes = 4 * len(part.labels) * num_features
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"{path}: {len(part.labels)} rows of {num_features} features are {num_bytes} bytes when dense; "
            f"at most {MAX_BYTES} are made"
        )
    dense = torch.zeros(len(part.labels), num_features)
    dense[torch.tensor(part.rows, dtype=torch.long), torch.tensor(part.columns, dtype=torch.long)] = torch.tensor(
        part.values, dtype=torch.float32
    )
    return dense


def _labels(part: Sparse, two_classes: bool) -> Tensor:
    labels = torch.tensor(part.labels)
    return (labels > 0).long() if two_classes else labels
