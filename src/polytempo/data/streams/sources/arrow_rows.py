"""Rows of Arrow's batches: numbers as tensors, a column at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack


def arrow_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a `pyarrow.RecordBatch` or `Table`, each a dict of its columns' values.

    Numbers become tensors of the column's type in Arrow's own memory, booleans in a copy, and lists of numbers tensors
    with memory of their own, so that a sample that is kept does not keep its batch. Text, binary, columns with nulls
    and all others: Python's.
    """
    names = batch.schema.names
    columns = [_values(batch.column(place)) for place in range(len(names))]
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


def _values(column: Any) -> Iterable[Any]:
    import pyarrow

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    if column.null_count:
        return column.to_pylist()  # type: ignore[no-any-return]
    if _is_number(kind):
        return _tensor(column).unbind()
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
    if not (is_list or pyarrow.types.is_fixed_size_list(kind)) or not _is_number(kind.value_type):
        return column.to_pylist()  # type: ignore[no-any-return]
    flat = column.flatten()
    if flat.null_count:
        return column.to_pylist()  # type: ignore[no-any-return]
    lengths = column.value_lengths().to_pylist()
    return (part.clone() for part in _tensor(flat).split(lengths)) if lengths else ()


def _is_number(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _tensor(column: Any) -> torch.Tensor:
    """The numbers in Arrow's own memory, because only these rows have it. Booleans are bits there, and are copied;
    unsigned numbers above 8 bits become int64."""
    import pyarrow

    if pyarrow.types.is_boolean(column.type):
        return torch.from_numpy(column.to_numpy(zero_copy_only=False))
    if pyarrow.types.is_unsigned_integer(column.type) and column.type.bit_width > 8:
        return torch.from_numpy(column.to_numpy(zero_copy_only=False).astype(np.int64))
    return from_dlpack(column)
