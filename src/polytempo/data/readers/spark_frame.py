"""A Spark DataFrame as a data set in parts: each Spark task writes its partition where the workers can read it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from polytempo.data.readers.parts import ROWS_PER_PART, PartWriter, start_folder, write_index

_SCHEMA = (
    "partition long, number long, rows long, kind string, "
    "inputs string, targets string, inputs_sha256 string, targets_sha256 string"
)
_NUMBERS = ("byte", "short", "integer", "long", "float", "double", "boolean", "decimal")
_RAISED = re.compile(r"^(?:[\w.]*\.)?ValueError: (.*)$", re.MULTILINE)


def from_spark(
    frame: Any,
    folder: str | Path,
    *,
    inputs: str | Sequence[str],
    target: str,
    rows_per_part: int = ROWS_PER_PART,
) -> str:
    """Write the columns `inputs` and `target` of `frame` to `folder`, and return its name for `read_parts`.

        folder = pt.data.from_spark(frame, "s3://bucket/clicks", inputs=["age", "price"], target="bought")
        job = pt.Job(data=lambda path: pt.Data(pt.data.read_parts(folder)), …)

    `inputs`: names of numeric columns, which become float32 (N, their number); or the name of one column of arrays of
    equal length, float32 (N, length). `target`: a numeric column; whole numbers become int64 (N,), others float32.

    Every partition is written once, by one task, as .npy files of at most `rows_per_part` rows (65,536); a task holds
    no more than one of these and one batch of Arrow's in memory. Rows keep the order of the partitions. Files of failed
    or repeated tasks are not named by the index, which is written last.

    `folder`: a path that all executors share, or a URL of fsspec. ValueError: it holds a data set already, a column is
    missing or of another type, a row has a null or an array of another length. Needs pyarrow, as all of Spark's Arrow
    functions do.
    """
    names = [inputs] if isinstance(inputs, str) else list(inputs)
    if missing := [name for name in (*names, target) if name not in frame.columns]:
        raise ValueError(f"the DataFrame has no column {', '.join(missing)}; it has {', '.join(frame.columns)}")
    if not names:
        raise ValueError("inputs names no column")
    place = start_folder(folder)
    stacked = not isinstance(inputs, str) or not _is_array(frame, inputs)

    def write(batches: Iterable[Any]) -> Iterator[Any]:
        return write_partition(batches, place, names if stacked else names[0], target, rows_per_part)

    written = _collected(frame.select(*names, target).mapInArrow(write, _SCHEMA))
    written.sort(key=lambda row: (row["partition"], row["number"]))
    write_index(place, [_entry(row.asDict()) for row in written])
    return place


def write_partition(
    batches: Iterable[Any], folder: str, inputs: str | Sequence[str], target: str, rows_per_part: int
) -> Iterator[Any]:
    """Runs in a task of Spark: writes the rows of its Arrow batches; yields one batch, a row for each part."""
    import pyarrow
    from pyspark import TaskContext

    task = TaskContext.get()
    assert task is not None
    partition = task.partitionId()
    writer = PartWriter(folder, f"part-{partition:05d}-{task.taskAttemptId()}", rows_per_part)
    for batch in batches:
        columns = {name: batch.column(index) for index, name in enumerate(batch.schema.names)}
        names = [inputs] if isinstance(inputs, str) else inputs
        for name in (*names, target):
            if columns[name].null_count:
                raise ValueError(f"column {name} has nulls; fill them, or leave their rows out: frame.dropna()")
        found = _array(columns[inputs], inputs) if isinstance(inputs, str) else _stacked(columns, inputs)
        writer.add(found, _targets(columns[target].to_numpy(zero_copy_only=False), target))
    rows = [_row(partition, number, entry) for number, entry in enumerate(writer.finish())]
    yield from [pyarrow.RecordBatch.from_pylist(rows)] if rows else []


def _collected(frame: Any) -> list[Any]:
    """The rows of `frame`. A ValueError of a task is a ValueError here; Spark's own holds it as text."""
    try:
        found: list[Any] = frame.collect()
    except Exception as error:
        if said := _RAISED.search(str(error)):
            raise ValueError(said.group(1)) from error
        raise
    return found


def _row(partition: int, number: int, entry: Any) -> dict[str, Any]:
    files = {kind: entry[kind]["name"] for kind in ("inputs", "targets")}
    hashes = {f"{kind}_sha256": entry[kind]["sha256"] for kind in ("inputs", "targets")}
    return {"partition": partition, "number": number, "rows": entry["rows"], "kind": entry["kind"], **files, **hashes}


def _entry(row: dict[str, Any]) -> dict[str, Any]:
    files = {kind: {"name": row[kind], "sha256": row[f"{kind}_sha256"]} for kind in ("inputs", "targets")}
    return {"rows": row["rows"], "kind": row["kind"], **files}


def _is_array(frame: Any, name: str) -> bool:
    kind: str = frame.schema[name].dataType.typeName()
    if kind not in ("array", *_NUMBERS):
        raise ValueError(f"column {name} is of type {kind}; inputs are numbers or arrays of numbers")
    return kind == "array"


def _array(column: Any, name: str) -> numpy.ndarray[Any, Any]:
    """A column of lists as (N, length)."""
    values = column.flatten()
    if values.null_count:
        raise ValueError(f"column {name} has arrays with nulls in them")
    lengths = set(column.value_lengths().to_pylist())
    if len(lengths) > 1:
        raise ValueError(f"column {name} has arrays of different lengths, such as {sorted(lengths)[:3]}")
    flat = values.to_numpy(zero_copy_only=False).astype(numpy.float32)
    return numpy.ascontiguousarray(flat.reshape(len(column), -1))


def _stacked(columns: dict[str, Any], names: Sequence[str]) -> numpy.ndarray[Any, Any]:
    """Numeric columns side by side, (N, their number)."""
    found = [columns[name].to_numpy(zero_copy_only=False).astype(numpy.float32) for name in names]
    return numpy.stack(found, axis=1)


def _targets(values: numpy.ndarray[Any, Any], name: str) -> numpy.ndarray[Any, Any]:
    if values.dtype.kind in "iub":
        return values.astype(numpy.int64)
    if values.dtype.kind == "f":
        return values.astype(numpy.float32)
    raise ValueError(f"column {name} holds values of type {values.dtype}; a target is a number")
