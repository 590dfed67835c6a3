"""Tables among the parameters: which of their rows each shard holds.

parameters     [ w1 │ table table table table │ w2 ]
spans           └─ shard 0 ──┘└── shard 1 ────────┘
dense vector   [ w1 │ w2 ]                            all parameters but the tables: a push carries it whole
pieces          shard 0: rows 0-1   shard 1: rows 2-3          of these a push carries touched rows only
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from polytempo.server.layout import Parameter, Span, Spans


class TablePiece(NamedTuple):
    """The rows `first … first+num_rows-1` of a table, which one shard holds as its rows 0, 1, 2, …"""

    table: int
    """The number of the table, in the parameters' order."""
    name: str
    group: int
    first: int
    num_rows: int
    width: int


Pieces = tuple[TablePiece, ...]
"""The pieces of one shard, in the order of its own vector."""


class TableSplit(NamedTuple):
    """A shard's ranges of the dense vector, and its pieces of tables."""

    dense: Spans
    pieces: Pieces


def without_tables(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """The parameters that make up the dense vector."""
    return tuple(parameter for parameter in parameters if not parameter.row_width)


def split(parameters: Sequence[Parameter], spans: Spans) -> TableSplit:
    """`spans`, ranges of all parameters that keep rows whole, taken apart."""
    if not any(parameter.row_width for parameter in parameters):
        return TableSplit(spans, ())
    dense: list[Span] = []
    pieces: list[TablePiece] = []
    for found in _cuts(parameters, spans):
        parameter, width = found.parameter, found.parameter.row_width
        if width:
            first, count = found.offset // width, found.length // width
            pieces.append(TablePiece(found.table, parameter.name, parameter.group, first, count, width))
            continue
        begin = found.dense_start + found.offset
        if dense and dense[-1].end == begin:
            dense[-1] = Span(dense[-1].begin, begin + found.length)
        else:
            dense.append(Span(begin, begin + found.length))
    return TableSplit(tuple(dense), tuple(pieces))


def cut(vector: Tensor, parameters: Sequence[Parameter], spans: Spans) -> tuple[list[Tensor], list[Tensor]]:
    """A shard's own vector as views: its dense ranges, flat, and its pieces of tables, (rows, width)."""
    dense: list[Tensor] = []
    tables: list[Tensor] = []
    for found in _cuts(parameters, spans):
        values = vector[found.at : found.at + found.length]
        if found.parameter.row_width:
            tables.append(values.view(-1, found.parameter.row_width))
        else:
            dense.append(values)
    return dense, tables


class _Cut(NamedTuple):
    """The elements that one span and one parameter have in common."""

    parameter: Parameter
    table: int
    """The table's number, for a table."""
    dense_start: int
    """The begin in the dense vector, for another parameter."""
    offset: int
    """The begin in the parameter."""
    length: int
    at: int
    """The begin in the shard's own vector."""


def _cuts(parameters: Sequence[Parameter], spans: Spans) -> Iterator[_Cut]:
    at = 0
    for span in spans:
        start = table = dense_start = 0
        for parameter in parameters:
            begin, end = max(span.begin, start), min(span.end, start + parameter.numel)
            if begin < end:
                yield _Cut(parameter, table, dense_start, begin - start, end - begin, at)
                at += end - begin
            start += parameter.numel
            if parameter.row_width:
                table += 1
            else:
                dense_start += parameter.numel
