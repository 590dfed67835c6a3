"""`Tables`: a shard's pieces of tables. Workers push and pull only rows that gradients touch.

    push ──rows 3, 8──▶ sum by rows ── update ──▶ values[3], values[8]; changed[3] = changed[8] = version
    pull ◀──rows 3, 8── with `changed` after the version that the worker has

All rows travel as small copies: no part of a table is lent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from polytempo.core.rule import Service, UpdateRule
from polytempo.server.layout import Parameter, Spans
from polytempo.server.message import Push, Rows
from polytempo.server.pieces import Pieces, TablePiece, cut, split, without_tables
from polytempo.server.step_rates import Factor, Multiples, of_group

_MOST_RECENT = 64
"""The number of updates with listed rows, so that a pull need not search the whole table."""


class TableState(msgspec.Struct, array_like=True, eq=False):
    """One piece, as it is saved. `summed`: rows and values of the sum that no update has used yet."""

    values: Tensor
    squares: Tensor | None
    changed: Tensor
    """(rows,) int64: the version that last changed each row."""
    summed: tuple[Tensor, Tensor] | None


RowsTerm = tuple[Tensor, Tensor, float]
"""Rows (n,), ascending and without repeats; values (n, width); their factor in a sum."""


# ------------------------------------------------------------------------------------------------------------ refusals


def takes_rows(rule: UpdateRule) -> None:
    """Raise ValueError unless the optimizer changes no row that has no gradient."""
    plain = not rule.weight_decay and (rule.kind == "adagrad" or (rule.kind == "sgd" and not rule.momentum))
    if not plain:
        raise ValueError(
            "sparse gradients go with SGD without momentum or Adagrad, both without weight decay, and here is "
            f"{rule.kind} with momentum {rule.momentum:g} and weight decay {rule.weight_decay:g}; make the embedding "
            "with sparse=False"
        )


def serves_rows(service: Service) -> None:
    """Raise ValueError where `service` asks for something that a shard with tables cannot do."""
    if service.optimizer is not None:
        takes_rows(service.optimizer)
    if service.reassigns is not None:
        raise ValueError(
            "workers that help each other push slices' gradients as whole vectors; make the embedding with sparse=False"
        )
    for modifier in service.modifiers:
        if modifier.needs_basis:
            raise ValueError(
                f"{modifier.name} needs the weights that each gradient was computed on, which shards do not keep of "
                "tables; make the embedding with sparse=False"
            )


# ---------------------------------------------------------------------------------------------------------------- sums


def summed(terms: Sequence[RowsTerm]) -> tuple[Tensor, Tensor]:
    """Σ factor · values by rows: rows (n,) ascending and without repeats, values (n, width). At least one term.

    A row's sum is in the order of the terms; each term names a row at most once. One term with factor 1 comes back as
    it is, without a copy.
    """
    first_rows, first_values, first_factor = terms[0]
    if len(terms) == 1:
        return first_rows, first_values if first_factor == 1 else first_values * first_factor
    rows = torch.unique(torch.cat([rows for rows, _, _ in terms]))
    total = first_values.new_zeros(len(rows), first_values.shape[1])
    for term_rows, values, factor in terms:
        total.index_add_(0, torch.searchsorted(rows, term_rows), values, alpha=factor)
    return rows, total


# -------------------------------------------------------------------------------------------------------------- tables


class SeparatedTables(NamedTuple):
    """A shard's tables, if it has any, and the dense rest with its layout."""

    tables: Tables | None
    parameters: tuple[Parameter, ...]
    spans: Spans
    weights: Tensor


def separate_tables(
    parameters: tuple[Parameter, ...], spans: Spans, weights: Tensor, service: Service
) -> SeparatedTables:
    """Separate `weights`, the elements of `spans`, into tables and the rest. ValueError where `service` allows none."""
    found = split(parameters, spans)
    if not found.pieces:
        return SeparatedTables(None, parameters, spans, weights)
    serves_rows(service)
    dense, values = cut(weights, parameters, spans)
    tables = Tables(found.pieces, values, service)
    return SeparatedTables(
        tables=tables,
        parameters=without_tables(parameters),
        spans=found.dense,
        weights=torch.cat(dense) if dense else weights[:0],
    )


class Tables:
    """The pieces of one shard, which begin as `values`, each (rows, width)."""

    def __init__(self, pieces: Pieces, values: Sequence[Tensor], service: Service) -> None:
        assert service.optimizer is not None, "the shard has seen to it"
        self.pieces = pieces
        self._rule, self._modifiers = service.optimizer, service.modifiers
        self._allow_nan = service.allow_nan
        self._dtype = values[0].dtype
        self._tables = [_Table(piece, table, self._rule) for piece, table in zip(pieces, values, strict=True)]
        self._last_group = max(piece.group for piece in pieces)

    def fault(self, push: Push) -> str:
        """The reason to refuse the rows of `push`; "" if there is none. Cost: one read of them."""
        who = f"worker {push.worker}"
        if self._rule.lr is None and len(push.lrs) <= self._last_group:
            return f"{who}: no learning rate for parameter group {self._last_group}: lrs are {push.lrs}"
        numbers = [rows.piece for rows in push.rows]
        if numbers != sorted(set(numbers)) or not all(0 <= number < len(self.pieces) for number in numbers):
            return f"{who} pushes rows of the pieces {numbers}, but the shard holds 0 to {len(self.pieces) - 1}"
        known = ((rows, self.pieces[rows.piece]) for rows in push.rows)
        faults = (_fault(rows, piece, self._dtype, allow_nan=self._allow_nan) for rows, piece in known)
        return next((f"{who}, clock {push.clock}: {fault}" for fault in faults if fault), "")

    def add(self, rows: Sequence[Rows], multiples: Multiples, gradient: Tensor, weights: Tensor) -> Tensor:
        """Add a push's rows to the sum, as soon as it is updated from or kept: until then they must stay.

        The sum before them is multiplied as `multiples` says.

        `gradient` is the push's dense part, at `weights`; the answer is that part. Modifiers see both parts as one flat
        vector, the rows behind, so that clipping has the norm of all.
        """
        for modifier in self._modifiers:
            flats = [gradient, *(one.values.reshape(-1) for one in rows)]
            present = [self._tables[one.piece].values[one.rows].view(-1) for one in rows]
            answer = modifier.apply(torch.cat(flats), torch.cat([weights, *present]), None)
            gradient, *parts = answer.split([flat.numel() for flat in flats])
            rows = [Rows(r.piece, r.rows, part.view(r.values.shape)) for r, part in zip(rows, parts, strict=True)]
        if multiples.before is not None:
            for table in self._tables:
                table.multiply(of_group(multiples.before, table.group))
        for one in rows:
            table = self._tables[one.piece]
            table.terms.append((one.rows, one.values, of_group(multiples.own, table.group)))
        return gradient

    def keep_sum(self) -> None:
        """Copy the rows that were added and not used yet into memory of the shard: rows are only lent."""
        for table in self._tables:
            table.keep_sum()

    def update(self, divisor: Factor, rates: Sequence[float], step: int, version: int) -> None:
        """Step number `step` of the optimizer with the sum over `divisor`, which makes `version`; then the sum is 0."""
        for table in self._tables:
            table.update(of_group(divisor, table.group), rates[table.group], step, version)

    @property
    def values(self) -> list[Tensor]:
        """The present pieces, (rows, width) each: read them only, and before the next entry."""
        return [table.values for table in self._tables]

    def changed_after(self, basis: int) -> tuple[Rows, ...]:
        """The rows that have changed after version `basis` (-1: all), as they are now, in memory of their own."""
        found = ((number, table.changed_after(basis)) for number, table in enumerate(self._tables))
        return tuple(Rows(number, rows, self._tables[number].values[rows]) for number, rows in found if len(rows))

    def dump(self) -> list[TableState]:
        """The whole state; its tensors are these tables' own."""
        return [table.dump() for table in self._tables]

    def load(self, states: Sequence[TableState]) -> None:
        """Become the tables that `dump` was called on; the tensors are given away. ValueError where they do not fit."""
        if len(states) != len(self._tables):
            raise ValueError(f"the shard holds {len(self._tables)} pieces of tables, and the state {len(states)}")
        for table, state in zip(self._tables, states, strict=True):
            table.load(state)


def _fault(rows: Rows, piece: TablePiece, dtype: torch.dtype, *, allow_nan: bool) -> str:
    index, values, name = rows.rows, rows.values, piece.name
    if index.dim() != 1 or index.dtype != torch.int64 or values.shape != (len(index), piece.width):
        return f"rows {tuple(index.shape)} and values {tuple(values.shape)} are none of {name}, {piece.width} wide"
    if values.dtype != dtype:
        return f"the rows of {name} are {values.dtype}, but the shard holds {dtype}"
    if not len(index):
        return ""
    if int(index[0]) < 0 or int(index[-1]) >= piece.num_rows or not bool((index[1:] > index[:-1]).all()):
        return (
            f"rows of {name} must be ascending, each once, from 0 to {piece.num_rows - 1}; they are from "
            f"{int(index.min())} to {int(index.max())}"
        )
    if allow_nan or math.isfinite(float(values.sum())):  # a sum may overflow, but no sum hides a NaN or an infinity
        return ""
    bad = (~torch.isfinite(values)).nonzero()
    if not len(bad):
        return ""
    row, column = (int(at) for at in bad[0])
    return f"the gradient of {name}[{piece.first + int(index[row])}, {column}] is {float(values[row, column])}"


class _Table:
    """One piece: its rows' values, the optimizer's memory of them, and when each changed."""

    def __init__(self, piece: TablePiece, values: Tensor, rule: UpdateRule) -> None:
        self.piece, self._rule = piece, rule
        self.group = piece.group if rule.lr is None else 0  # one rate for all
        self.values = values.clone()
        self.squares = torch.full_like(self.values, rule.initial) if rule.kind == "adagrad" else None
        self.changed = torch.zeros(piece.num_rows, dtype=torch.int64)
        self.terms: list[RowsTerm] = []
        self._kept: RowsTerm | None = None
        self._recent: list[tuple[int, Tensor]] = []
        """(version, its rows) of the last updates: a shorter way to the rows that `changed` also names."""
        self._recent_after = 0
        """Every update after this version is in `_recent`."""

    def multiply(self, factor: float) -> None:
        """The sum so far."""
        self.terms = [(rows, values, own * factor) for rows, values, own in self.terms]
        if self._kept is not None:
            rows, values, own = self._kept
            self._kept = rows, values, own * factor

    def keep_sum(self) -> None:
        if self.terms or (self._kept is not None and self._kept[2] != 1):
            rows, values = self._sum()
            owned = len(self.terms) > 1 or self._kept is not None or self.terms[0][2] != 1
            self._kept = rows.clone(), values if owned else values.clone(), 1.0
            self.terms = []

    def _sum(self) -> tuple[Tensor, Tensor]:
        return summed(self.terms if self._kept is None else [self._kept, *self.terms])

    def update(self, divisor: float, lr: float, step: int, version: int) -> None:
        if not self.terms and self._kept is None:
            return
        rows, gradient = self._sum()
        self.terms, self._kept = [], None
        if divisor != 1:
            gradient = gradient / divisor
        if self._rule.maximize:
            gradient = -gradient
        if self.squares is not None:
            lr /= 1 + (step - 1) * self._rule.lr_decay
            gradient = _scaled_by_history(self._rule, gradient, self.squares, rows)
        self.values.index_add_(0, rows, gradient, alpha=-lr)
        self.changed[rows] = version
        self._recent.append((version, rows.clone()))
        if len(self._recent) > _MOST_RECENT:
            self._recent_after = self._recent.pop(0)[0]

    def changed_after(self, basis: int) -> Tensor:
        if basis < 0:
            return torch.arange(self.piece.num_rows)
        if basis < self._recent_after:
            return (self.changed > basis).nonzero().view(-1)
        recent = [rows for version, rows in self._recent if version > basis]
        return torch.unique(torch.cat(recent)) if recent else torch.empty(0, dtype=torch.int64)

    def dump(self) -> TableState:
        summed = None if self._kept is None else self._kept[:2]
        return TableState(self.values, self.squares, self.changed, summed)

    def load(self, state: TableState) -> None:
        alike = [state.values] if state.squares is None else [state.values, state.squares]
        fits = all(t.shape == self.values.shape and t.dtype == self.values.dtype for t in alike)
        if not fits or state.changed.shape != self.changed.shape or (state.squares is None) != (self.squares is None):
            raise ValueError(
                f"the shard holds {tuple(self.values.shape)} of {self.piece.name}, and the state "
                f"{tuple(state.values.shape)}, or it is of another optimizer"
            )
        self.values, self.squares, self.changed = state.values, state.squares, state.changed
        self.terms, self._kept = [], None if state.summed is None else (*state.summed, 1.0)
        self._recent, self._recent_after = [], int(self.changed.max()) if len(self.changed) else 0


def _scaled_by_history(rule: UpdateRule, gradient: Tensor, squares: Tensor, rows: Tensor) -> Tensor:
    """Adagrad's g / (√Σ g² + ε), the present gradient in the sum; in the order of operations of torch's sparse one."""
    total = squares[rows].add_(gradient.square())
    squares[rows] = total
    root = total.sqrt()
    if rule.eps:
        root.add_(rule.eps)
    else:
        root.masked_fill_(total == 0, math.inf)  # without ε, a weight that never had a gradient stays: 0/0 is 0
    return gradient / root
