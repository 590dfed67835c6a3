"""Numbers of cases that the tests look at, by the budget that the environment's BUDGET names.

- `all` (`make test-all`): every case of every test. - `ci` (`make test-all CASES=ci`, continuous integration): every
sixth case of a test with many, and every third of the files that start processes, other files on the next day. In each
file every value of each parameter is met. - `test` (`make
test`): every twelfth, without the slowest files; of a parameter with many values a file meets every third. - `check`
(`make check`): fewer still.

Without a budget all cases of tests are there, and laws that look at many cases inside look at half of them. Which cases
are chosen follows from SEED alone, so that a failure is there again in the next run.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple, TypeVar
from zlib import crc32

T = TypeVar("T")
Values = Mapping[str, Hashable]
"""A case: the value of each of its parameters."""


class Budget(NamedTuple):
    """A test of more than `few` cases has one of each `of`; a test that looks at cases inside, one of each `inside`."""

    few: int
    of: int
    inside: int
    values: int = 1
    """Of a parameter's many values a file meets one of each so many."""
    files: int = 1
    """One of each so many files of `RUNS` has its turn."""


BUDGETS = {
    "all": Budget(few=1, of=1, inside=1),
    "": Budget(few=1, of=1, inside=1),
    "ci": Budget(few=4, of=6, inside=3, files=3),
    "test": Budget(few=3, of=12, inside=8, values=3),
    "check": Budget(few=2, of=16, inside=12, values=6),
}
NAME = os.environ.get("BUDGET", "")
BUDGET = BUDGETS[NAME]
ALL = NAME == "all"
SEED = int(os.environ.get("SEED", "1"))
RUNS = ("tests/commands/", "tests/process/")
"""Folders of tests that start processes, which take most of the time."""
SMALL = 12
"""A parameter with so few values has each of them met in every test; one with more has each of them met in its file."""


def some_of(cases: Sequence[T], number: int, of: int = 2) -> list[T]:
    """One of each `of` cases: another one for the next `number`. All of them where all are asked for."""
    step = of * BUDGET.inside
    return list(cases) if ALL else list(cases[number % min(step, len(cases)) :: step])


def examples(number: int) -> int:
    """The examples that hypothesis looks at, of `number` with all cases."""
    return max(1, number // BUDGET.inside)


def has_turn(file: str) -> bool:
    """True if the budget pays for the file."""
    return not file.startswith(RUNS) or (crc32(file.encode()) + SEED) % BUDGET.files == 0


def chosen(tests: Mapping[str, Sequence[Values]], budget: Budget = BUDGET) -> dict[str, list[int]]:
    """Numbers of the cases to look at, for the tests of a file, each with its cases."""
    met: set[tuple[str, Hashable]] = set()
    kept = {test: _some(test, cases, met, budget) for test, cases in tests.items()}
    unmet = 0
    for test, cases in tests.items():  # values that no test of the file has met
        for number, case in enumerate(cases):
            if not met.issuperset(case.items()):
                met.update(case.items())
                unmet += 1
                if (unmet + SEED) % budget.values == 0:
                    kept[test].append(number)
    return {test: sorted(numbers) for test, numbers in kept.items()}


def _some(test: str, cases: Sequence[Values], met: set[tuple[str, Hashable]], budget: Budget) -> list[int]:
    """Some of one test's cases, first the cases with values that no test has met; `met` gets their values."""
    order = list(range(len(cases)))
    Random(f"{SEED} {test}").shuffle(order)
    order.sort(key=lambda number: met.issuperset(cases[number].items()))
    most = max(budget.few, math.ceil(len(cases) / budget.of))
    kept, others = order[:most], order[most:]
    small = set(_small(cases)) - {value for number in kept for value in cases[number].items()}
    for number in others:
        if new := small & set(cases[number].items()):
            small -= new
            kept.append(number)
    met.update(value for number in kept for value in cases[number].items())
    return kept


def _small(cases: Sequence[Values]) -> Iterator[tuple[str, Hashable]]:
    """The values of all parameters that have few."""
    values: dict[str, set[Hashable]] = defaultdict(set)
    for case in cases:
        for name, value in case.items():
            values[name].add(value)
    return ((name, value) for name, few in values.items() if len(few) <= SMALL for value in few)
