"""Refusals: features that no run can have together, by one table, `refusals.toml`.

Features of a strategy are `Strategy.features`. A program adds the features that it was asked for ("own loop",
"noise scale", …). The first row with a subset of these features is the refusal.
"""

from __future__ import annotations

import tomllib
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Refusal(NamedTuple):
    """A row: no run has all of `features`. The texts name `{strategy}` and other values of the run."""

    code: str
    features: frozenset[str]
    why: str
    remedy: str


class Incompatible(ValueError):
    """Features that exclude each other. `code` names the row of the table, as in "PT1203"."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(code, message)

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


@cache
def refusals() -> tuple[Refusal, ...]:
    """All rows, in the order of the search."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(Refusal(code, frozenset(row.pop("features")), **row) for code, row in rows.items())


def refusal_of(features: Set[str]) -> Refusal | None:
    """The first row with a subset of `features`; None where no feature excludes another."""
    return next((row for row in refusals() if row.features <= features), None)


def refuse(features: Set[str], **values: object) -> None:
    """Raise `Incompatible` where some of the features exclude each other. `values` fill in the texts."""
    row = refusal_of(features)
    if row is not None:
        raise Incompatible(row.code, f"{row.why}; {row.remedy}".format(**values))
