"""The choice of cases: in each file every value of every parameter is met, the same ones in every run."""

from __future__ import annotations

from itertools import product

import pytest

import some_cases
from some_cases import BUDGETS, Budget, chosen, some_of

BUDGET = Budget(few=6, of=4, inside=3)
ROWS = [object() for _ in range(40)]
GRID = [{"row": id(row), "size": size} for row, size in product(ROWS, (1, 2, 3))]
ALONE = [{"row": id(row)} for row in ROWS[:10]]


def test_every_value_is_met_in_its_file() -> None:
    """Rows in one of the tests, the few sizes in each."""
    tests = {"first": GRID, "second": GRID, "alone": ALONE}
    kept = {test: [tests[test][number] for number in numbers] for test, numbers in chosen(tests, BUDGET).items()}
    assert {case["row"] for cases in kept.values() for case in cases} == set(map(id, ROWS))
    assert all({case["size"] for case in kept[test]} == {1, 2, 3} for test in ("first", "second"))
    assert len(kept["first"]) + len(kept["second"]) + len(kept["alone"]) <= (120 + 120) / 4 + 6 + 2 * 3


def test_a_budget_may_leave_out_values() -> None:
    """A parameter's few values are met by each test, and of many a third and those of the first choice."""
    kept = chosen({"test": GRID}, Budget(few=3, of=40, inside=1, values=3))["test"]
    assert {GRID[number]["size"] for number in kept} == {1, 2, 3}
    assert len(ROWS) / 3 - 1 <= len({GRID[number]["row"] for number in kept}) <= len(ROWS) / 3 + 3 + 3


def test_the_next_test_begins_with_other_values() -> None:
    kept = chosen({"first": GRID, "second": GRID}, BUDGET)
    first, second = ({GRID[number]["row"] for number in kept[test]} for test in ("first", "second"))
    assert not first >= second


@pytest.mark.parametrize("cases", [[{}], ALONE[:6], [{"size": 1}] * 6])
def test_few_cases_stay(cases: list[dict[str, int]]) -> None:
    assert chosen({"test": cases}, BUDGET) == {"test": list(range(len(cases)))}


@pytest.mark.parametrize("name", ["all", ""])
def test_no_budget_leaves_a_case_out(name: str) -> None:
    assert chosen({"test": GRID}, BUDGETS[name]) == {"test": list(range(len(GRID)))}


def test_cases_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours get other ones, together all of them, and each at least one."""
    monkeypatch.setattr(some_cases, "ALL", False)
    monkeypatch.setattr(some_cases, "BUDGET", BUDGET)
    met = [some_of(range(12), number) for number in range(6)]
    assert sorted(case for some in met for case in some) == list(range(12))
    assert all(len(some_of("ab", number)) == 1 for number in range(9))
    monkeypatch.setattr(some_cases, "ALL", True)
    assert some_of("abc", 1) == ["a", "b", "c"]
