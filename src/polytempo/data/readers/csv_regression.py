"""A CSV table with a header, to predict one of its columns, a number or a class, from the others."""

from __future__ import annotations

import csv
import io
import math
from statistics import median
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from polytempo.core.system.url_path import Place, UrlPath, place
from polytempo.data.plan import permutation
from polytempo.data.readers import Split

MAX_BYTES = 1 << 30
MAX_CATEGORIES = 100
TEST_FRACTION = 0.2
_NO_CLASS = -100

Column = list[list[float]]
"""One column of the table as the model's inputs: for each input its values, a row each."""


class Table(NamedTuple):
    """A CSV file as text."""

    path: Place
    names: list[str]
    rows: list[list[str]]
    """Each as long as `names`."""


def csv_regression(path: str | Place, target: str, seed: int = 0, *, like: str | Place | None = None) -> Split:
    """The table in `path`: 80 % of its rows to train on, the rest to test with, drawn by `seed`.

    `path`: a file, or its URL by fsspec, such as s3://bucket/table.csv, which each process reads as a whole.

    Inputs float32 (N, features), target float32 (N, 1). Columns of numbers and the target are less their mean, over
    their standard deviation; empty cells count as the median. A column with text has one input for each of its values,
    sorted: 1 where it is that value, else 0. Means, deviations and medians belong to the training rows. Errors name the
    file and the column or line.

    `like`: the table that a model was trained on. Its rows are to train on, and give means, deviations, medians and
    values of text; all rows of `path` are to test with, in their order. They may have the columns in another order, and
    no target: it is NaN then.
    """
    return numbers_of(read_table(path), target, seed, like=like)


def numbers_of(table: Table, target: str, seed: int = 0, *, like: str | Place | None = None) -> Split:
    """`csv_regression` of a table that has been read."""
    x, cells, train, test, where = _inputs(table, target, seed, like)
    numbers = _target(cells, 0 if like is None else len(cells) - len(test), where)
    y = torch.tensor(_standardized(numbers, train)).unsqueeze(1)
    return _split(x, y, train, test, outputs=[target], units=_moments(numbers, train))


def csv_classes(path: str | Place, target: str, seed: int = 0, *, like: str | Place | None = None) -> Split:
    """The table as in `csv_regression`; `target` has classes: int64 (N,), numbered in the order of names. Where a table
    has no target, it is -100, which torch's losses leave out."""
    return classes_of(read_table(path), target, seed, like=like)


def classes_of(table: Table, target: str, seed: int = 0, *, like: str | Place | None = None) -> Split:
    """`csv_classes` of a table that has been read."""
    x, cells, train, test, where = _inputs(table, target, seed, like)
    known = cells if like is None else cells[: len(cells) - len(test)]
    classes = sorted({cell for cell in known if cell is not None})
    if len(classes) > MAX_CATEGORIES or len(classes) < 2:
        raise ValueError(
            f"{where}: {len(classes)} different values; there may be 2 to {MAX_CATEGORIES} classes; for numbers use "
            "csv_regression"
        )
    if unknown := {cell for cell in cells if cell is not None and cell not in classes}:
        raise ValueError(f"{where}: {min(unknown)!r} is not among the classes of {like}: {', '.join(classes)}")
    y = torch.tensor([_NO_CLASS if cell is None else classes.index(cell) for cell in cells])
    return _split(x, y, train, test, classes=classes, outputs=classes)


def _split(x: Tensor, y: Tensor, train: list[int], test: list[int], **facts: object) -> Split:
    """The two parts, each with these `facts` as attributes: `outputs`, the names of a model's outputs, and `units`, the
    mean and the deviation of a number's."""
    parts = Split(TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test]))
    for part in parts:
        vars(part).update(facts)
    return parts


def _inputs(
    table: Table, target: str, seed: int, like: str | Place | None
) -> tuple[Tensor, list[str | None], list[int], list[int], str]:
    """The inputs, the target's cells, the rows to train on and to test with, and the target's place."""
    first, names, rows = table if like is None else read_table(like)
    if target not in names or len(names) < 2:
        raise ValueError(f"{first} has no column {target!r} next to others; its columns are {', '.join(names)}")
    cells: list[str | None] = [row[names.index(target)] for row in rows]
    order, seen = permutation(len(rows), seed, 0).tolist(), len(rows)
    train = order[: len(rows) - round(len(rows) * TEST_FRACTION)]
    test = order[len(train) :]
    if not test:
        raise ValueError(f"{first} has {len(rows)} rows, too few to set some aside for testing")
    if like is not None:
        _, own, more = table
        if missing := [name for name in names if name != target and name not in own]:
            raise ValueError(f"{table.path} has no column {missing[0]!r}; its columns are {', '.join(own)}")
        rows += [[row[own.index(name)] if name in own else "" for name in names] for row in more]
        cells += [row[own.index(target)] or None if target in own else None for row in more]
        test = list(range(seen, len(rows)))
    inputs: Column = []
    for number, name in enumerate(names):
        if name != target:
            inputs += _column([row[number] for row in rows], train, seen, f"{table.path}, column {name!r}")
    x = torch.tensor(inputs).T.contiguous()
    return x, cells, train, test, f"{table.path}, column {target!r}"


def read_table(path: str | Place) -> Table:
    """The CSV file at `path`, a file or its URL. ValueError for a row that is not as long as the header."""
    path = place(path)
    with io.TextIOWrapper(_opened(path), newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            names = [name.strip() for name in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {reader.line_num + 1}: {error}") from error
    for line, row in rows:
        if len(row) != len(names):
            raise ValueError(f"{path}, line {line}: {len(row)} cells under a header of {len(names)}")
    return Table(path, names, [[cell.strip() for cell in row] for _, row in rows])


def _opened(path: Place) -> BinaryIO:
    content = path.read(MAX_BYTES + 1) if isinstance(path, UrlPath) else b""
    size = len(content) if isinstance(path, UrlPath) else path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes or more; at most {MAX_BYTES} are read")
    return io.BytesIO(content) if isinstance(path, UrlPath) else path.open("rb")


def _column(cells: list[str], train: list[int], seen: int, where: str) -> Column:
    """The first `seen` cells give the column's kind."""
    numbers = [finite_number(cell) for cell in cells]
    texts = [row for row, (number, cell) in enumerate(zip(numbers, cells, strict=True)) if number is None and cell]
    if texts and texts[0] < seen:
        return _one_hot(cells, seen, where)
    if texts:
        raise ValueError(
            f"{where}, row {texts[0] - seen + 1}: the model was trained on numbers, not {cells[texts[0]]!r}"
        )
    known = [value for row in train if (value := numbers[row]) is not None]
    if not known:
        raise ValueError(f"{where}: every cell of the training rows is empty; remove the column")
    middle = median(known)
    return [_standardized([middle if number is None else number for number in numbers], train)]


def _one_hot(cells: list[str], seen: int, where: str) -> Column:
    categories = sorted(set(cells[:seen]))
    if len(categories) > MAX_CATEGORIES:
        example = next(cell for cell in cells if cell and finite_number(cell) is None)
        raise ValueError(
            f"{where}: {example!r} is not a number, and {len(categories)} different values are too many for text "
            f"(at most {MAX_CATEGORIES}); mend the cell or remove the column"
        )
    return [[float(cell == category) for cell in cells] for category in categories]


def _target(cells: list[str | None], seen: int, where: str) -> list[float]:
    """Rows of the table with `like` are the first `seen`."""
    numbers: list[float] = []
    for row, cell in enumerate(cells, start=1 - seen):
        number = math.nan if cell is None else finite_number(cell)
        if number is None:
            raise ValueError(f"{where}, row {row}: the target must be a number, not {cell!r}")
        numbers.append(number)
    return numbers


def _standardized(numbers: list[float], train: list[int]) -> list[float]:
    mean, deviation = _moments(numbers, train)
    return [(number - mean) / deviation for number in numbers]


def _moments(numbers: list[float], train: list[int]) -> tuple[float, float]:
    """Mean and deviation of the rows to train on; sums are exact (fsum), so every machine gets the same."""
    known = [numbers[row] for row in train]
    mean = math.fsum(known) / len(known)
    return mean, math.sqrt(math.fsum((number - mean) ** 2 for number in known) / len(known)) or 1.0


def finite_number(cell: str) -> float | None:
    """The finite number in a cell, or None."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
