"""How many cases long laws look at: `make test` at some of each, `make test-runs`, which sets ALL_CASES=1, at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ALL = os.environ.get("ALL_CASES") == "1"


def some_of(cases: Sequence[T], number: int, of: int = 2) -> list[T]:
    """One of each `of` cases: another one for the next `number`. All of them where all are asked for."""
    return list(cases) if ALL else list(cases[number % of :: of])
