"""The table of claims: the sources of each row exist and have our figures."""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WRITER: dict[str, Any] = runpy.run_path(str(ROOT / "docs/claims/write.py"))
CLAIMS: list[tuple[str, Any]] = [(paper.name, claim) for paper in WRITER["papers"]() for claim in paper.claims]
BY_TESTS = [(name, c) for name, c in CLAIMS if c.rests and all("::" in each for each in c.rests)]
BY_PAGES = [(name, c) for name, c in CLAIMS if any("::" not in each for each in c.rests)]

NUMBER = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e-?\d+)?)( ?%)?")
"""A number that is not part of a name such as F1 or post2."""
HEADING = re.compile(r"^#+ (.*)$", flags=re.MULTILINE)


def label(value: object) -> str:
    return value.says[:60] if hasattr(value, "says") else str(value)


def numbers(text: str) -> list[tuple[float, bool]]:
    """The numbers of a text outside of code, and which are percentages."""
    plain = re.sub(r"`[^`]*`", "", text)
    return [(float(number.replace(",", "")), bool(percent)) for number, percent in NUMBER.findall(plain)]


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def definitions(file: str) -> dict[str, ast.stmt]:
    """The module's functions and assignments by name."""
    found: dict[str, ast.stmt] = {}
    for node in parsed(file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id: node for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def figures(rests: str) -> set[float]:
    """The numbers in a test's code, and in the names of its module that it uses; not in strings, so not in
    docstrings."""
    file, _, test = rests.partition("::")
    known, todo, seen, found = definitions(file), [test], set[str](), set[float]()
    while todo:
        name = todo.pop()
        if name in seen or name not in known:
            continue
        seen.add(name)
        for node in ast.walk(known[name]):
            if isinstance(node, ast.Name):
                todo.append(node.id)
            elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
                found.add(float(node.value))
    return found


def section(rests: str) -> str:
    """A page's text under the anchor's heading, down to the next heading of its level or above."""
    file, _, anchor = rests.partition("#")
    text = (ROOT / file).read_text(encoding="utf-8")
    headings = list(HEADING.finditer(text))
    for place, heading in enumerate(headings):
        if WRITER["anchor_of"](heading[1]) == anchor:
            level = heading[0].index(" ")
            ends = [h.start() for h in headings[place + 1 :] if h[0].index(" ") <= max(level, 2)]
            return text[heading.start() : min(ends, default=len(text))]
    raise AssertionError(f"{file} has no section {anchor!r}")


def lacks(claim: Any, found: set[float]) -> list[float]:
    """The numbers of `ours` that are missing in the claim's source; of a percentage its hundredth will do."""
    return [
        number
        for number, percent in numbers(claim.ours)
        if number not in found and not (percent and round(number / 100, 12) in {round(each, 12) for each in found})
    ]


def test_the_page_is_what_the_claims_say() -> None:
    """`python docs/claims/write.py` writes the page."""
    assert (ROOT / "docs/claims.md").read_text(encoding="utf-8") == WRITER["page"]()


def test_there_are_claims_of_every_status() -> None:
    """And of both kinds of evidence, or the tests below would hold nothing."""
    assert {claim.status for _, claim in CLAIMS} == set(WRITER["STATUSES"])
    assert len(BY_TESTS) > 20 < len(BY_PAGES)


@pytest.mark.parametrize(("paper", "claim"), BY_TESTS, ids=label)
def test_figures_are_those_of_a_test(paper: str, claim: Any) -> None:
    found = set[float]()
    for each in claim.rests:
        file, _, test = each.partition("::")
        assert isinstance(definitions(file).get(test), ast.FunctionDef), f"{paper}: there is no {each}"
        found |= figures(each)
    assert lacks(claim, found) == [], f"{paper}: {claim.rests} does not hold {claim.ours!r}"


@pytest.mark.parametrize(("paper", "claim"), BY_PAGES, ids=label)
def test_figures_are_those_of_a_benchmarks_page(paper: str, claim: Any) -> None:
    found = set[float]()
    for each in claim.rests:
        if "::" in each:
            found |= figures(each)
        else:
            text = section(each)
            found |= {number for number, _ in numbers(text.replace("`", " "))}
            assert claim.command in text, f"{paper}: {each} has no command {claim.command!r}"
    assert lacks(claim, found) == [], f"{paper}: {claim.rests} does not say {claim.ours!r}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("97.8 %, 1,410,876 bytes", [(97.8, True), (1410876, False)]),
        ("F1: 3.4 within 5 %, not v2.5 nor `top_k(0.01)`", [(3.4, False), (5, True)]),
        ("0.97, 14.5 and 29; 1e-12", [(0.97, False), (14.5, False), (29, False), (1e-12, False)]),
    ],
)
def test_numbers_of_a_text(text: str, found: list[tuple[float, bool]]) -> None:
    assert numbers(text) == found


def test_a_figure_that_is_not_there_is_found() -> None:
    rests = "tests/virtual/test_price.py::test_gibiansky_2017_ring"
    claim = WRITER["Claim"]("", "simulated", ours="0.4 s, and 0.41 s among 40")
    assert lacks(claim, figures(rests)) == [0.41]
    with pytest.raises(AssertionError, match="no section 'nowhere'"):
        section("benchmarks/virtual/README.md#nowhere")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"says": "s", "status": "done"}, "must be known ones"),
        ({"says": "s", "status": "simulated", "ours": "1", "rests": ["a"]}, "needs constants"),
        ({"says": "s", "status": "not attempted"}, "needs why"),
        ({"says": "s", "status": "reproduced", "figure": 1}, "has no figure"),
    ],
)
def test_a_claim_that_says_too_little_is_refused(row: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WRITER["_claim"](Path("paper.toml"), row)
