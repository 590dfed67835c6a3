"""A CSV table with a header, to predict one of its columns, a number or a class, from the others."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from polytempo.data.plan import permutation
from polytempo.data.readers import Split

MAX_BYTES = 1 << 30
MAX_CATEGORIES = 100
TEST_FRACTION = 0.2

Column = list[list[float]]
"""One column of the table as the model's inputs: for each input its values, a row each."""


def csv_regression(path: Path, target: str, seed: int = 0) -> Split:
    """The table in `path`: 80 % of its rows to train on, the rest to test with, drawn by `seed`.

    Inputs float32 (N, features), target float32 (N, 1). Columns of numbers and the target are less their mean, over
    their standard deviation; empty cells count as the median. A column with text has one input for each of its values,
    sorted: 1 where it is that value, else 0. Means, deviations and medians belong to the training rows. Errors name the
    file and the column or line.
    """
    x, cells, train, test, where = _inputs(path, target, seed)
    y = _target(cells, train, where)
    return Split(TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test]))


def csv_classes(path: Path, target: str, seed: int = 0) -> Split:
    """The table as in `csv_regression`; `target` has classes: int64 (N,), numbered in the order of names."""
    x, cells, train, test, where = _inputs(path, target, seed)
    classes = sorted(set(cells))
    if len(classes) > MAX_CATEGORIES or len(classes) < 2:
        raise ValueError(
            f"{where}: {len(classes)} different values; there may be 2 to {MAX_CATEGORIES} classes; for numbers use "
            "csv_regression"
        )
    y = torch.tensor([classes.index(cell) for cell in cells])
    return Split(TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test]))


def _inputs(path: Path, target: str, seed: int) -> tuple[Tensor, list[str], list[int], list[int], str]:
    """The inputs, the target's cells, the rows to train on and to test with, and the target's place."""
    names, rows = read_table(path)
    if target not in names or len(names) < 2:
        raise ValueError(f"{path} has no column {target!r} next to others; its columns are {', '.join(names)}")
    order = permutation(len(rows), seed, 0).tolist()
    train = order[: len(rows) - round(len(rows) * TEST_FRACTION)]
    test = order[len(train) :]
    if not test:
        raise ValueError(f"{path} has {len(rows)} rows, too few to set some aside for testing")
    inputs: Column = []
    for place, name in enumerate(names):
        if name != target:
            inputs += _column([row[place] for row in rows], train, f"{path}, column {name!r}")
    x = torch.tensor(inputs).T.contiguous()
    return x, [row[names.index(target)] for row in rows], train, test, f"{path}, column {target!r}"


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a CSV file, every row as long as the header."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            names = [name.strip() for name in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {reader.line_num + 1}: {error}") from error
    for line, row in rows:
        if len(row) != len(names):
            raise ValueError(f"{path}, line {line}: {len(row)} cells under a header of {len(names)}")
    return names, [[cell.strip() for cell in row] for _, row in rows]


def _column(cells: list[str], train: list[int], where: str) -> Column:
    numbers = [finite_number(cell) for cell in cells]
    if any(number is None and cell for number, cell in zip(numbers, cells, strict=True)):
        return _one_hot(cells, where)
    known = [value for row in train if (value := numbers[row]) is not None]
    if not known:
        raise ValueError(f"{where}: every cell of the training rows is empty; remove the column")
    middle = median(known)
    return [_standardized([middle if number is None else number for number in numbers], train)]


def _one_hot(cells: list[str], where: str) -> Column:
    categories = sorted(set(cells))
    if len(categories) > MAX_CATEGORIES:
        example = next(cell for cell in cells if cell and finite_number(cell) is None)
        raise ValueError(
            f"{where}: {example!r} is not a number, and {len(categories)} different values are too many for text "
            f"(at most {MAX_CATEGORIES}); mend the cell or remove the column"
        )
    return [[float(cell == category) for cell in cells] for category in categories]


def _target(cells: list[str], train: list[int], where: str) -> Tensor:
    numbers: list[float] = []
    for row, cell in enumerate(cells, start=1):
        number = finite_number(cell)
        if number is None:
            raise ValueError(f"{where}, row {row}: the target must be a number, not {cell!r}")
        numbers.append(number)
    return torch.tensor(_standardized(numbers, train)).unsqueeze(1)


def _standardized(numbers: list[float], train: list[int]) -> list[float]:
    """Less the mean, over the deviation; sums are exact (fsum), so every machine gets the same."""
    known = [numbers[row] for row in train]
    mean = math.fsum(known) / len(known)
    deviation = math.sqrt(math.fsum((number - mean) ** 2 for number in known) / len(known)) or 1.0
    return [(number - mean) / deviation for number in numbers]


def finite_number(cell: str) -> float | None:
    """The finite number in a cell, or None."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
