"""Write docs/claims.md from the claims beside this file: `python docs/claims/write.py`.

A paper is a TOML file with `title`, `source` and its claims:

    says       the paper's figure, in our words
    known      how we know it: "read" (the text, the abstract or the authors' code; not written down), "second-hand",
               "derived" (follows from the paper's rule) or "unchecked" (a lead that is not looked up)
    status     reproduced, not reproduced, simulated or not attempted
    ours       our figure; `constants` the assumptions of a simulation; `why` the reason for none, or for another figure
    rests      its evidence: "tests/FILE.py::test" or "benchmarks/FOLDER/README.md#section"
    command    the benchmark's, as its page has it

`tests/unit/test_claims.py` looks each of them up: a test or section that is gone, a number that is not there, or a page
that is another one fails.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parent / "claims.md"

STATUSES = {
    "reproduced": "our figure, or the paper's order of things, measured or computed by us",
    "simulated": "a result of the virtual world or a closed form, with the constants that the row names",
    "not reproduced": "tried; our figure is another one, and the row says why",
    "not attempted": "needs hardware, data or time that this project does not have",
}
KNOWN = {
    "read": "",
    "derived": " *(derived)*",
    "second-hand": " *(second-hand)*",
    "unchecked": " *(unchecked)*",
}
NEEDS = {
    "reproduced": ("ours", "rests"),
    "simulated": ("ours", "rests", "constants"),
    "not reproduced": ("why",),
    "not attempted": ("why",),
}
"""The fields that a claim of each status needs."""

HEAD = """# Claims of papers, and our figures

Compare the figures of the strategies' papers with ours, and rerun any of ours. `python docs/claims/write.py` writes
this page from [docs/claims](claims). [A test](../tests/unit/test_claims.py) fails where a row names a test or a
benchmark that is gone, or a number that is not in it.

| status | means | rows |
|---|---|---|
{statuses}

We have read a paper's figure in its text, its abstract or its authors' code, unless it is *derived* from the paper's
rule, known *second-hand*, or *unchecked*: remembered, and not looked up. Unchecked figures are leads.

A row of a test is run by `.venv/bin/python -m pytest FILE -k NAME`; a row of a benchmark by the command that it names.
The benchmark's page names the machine of its figures."""


class Claim(NamedTuple):
    """One figure of a paper."""

    says: str
    status: str
    known: str = "read"
    ours: str = ""
    constants: str = ""
    why: str = ""
    rests: tuple[str, ...] = ()
    command: str = ""


class Paper(NamedTuple):
    """A paper, or several about one thing."""

    name: str
    title: str
    source: str
    claims: list[Claim]


def papers() -> list[Paper]:
    """All papers, by their files' names. ValueError names a claim that says too little, or something unknown."""
    return [_paper(file) for file in sorted(HERE.glob("*.toml"))]


def _paper(file: Path) -> Paper:
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    return Paper(file.stem, found["title"], found["source"], [_claim(file, row) for row in found["claim"]])


def _claim(file: Path, row: dict[str, object]) -> Claim:
    if unknown := set(row) - set(Claim._fields):
        raise ValueError(f"{file.name}: a claim has no {', '.join(sorted(unknown))}; it has {', '.join(Claim._fields)}")
    claim = Claim(**row)._replace(rests=tuple(row.get("rests", ())))  # type: ignore[arg-type]
    if claim.status not in STATUSES or claim.known not in KNOWN:
        raise ValueError(f"{file.name}, {claim.says!r}: {claim.status=} and {claim.known=} must be known ones")
    if lacking := [field for field in NEEDS[claim.status] if not getattr(claim, field)]:
        raise ValueError(f"{file.name}, {claim.says!r} is {claim.status} and needs {' and '.join(lacking)}")
    return claim


def anchor_of(heading: str) -> str:
    """The anchor that a repository browser and the site give to a heading."""
    return "".join(c for c in heading.lower() if c.isalnum() or c in "-_ ").replace(" ", "-")


def page() -> str:
    """The text of docs/claims.md."""
    every = papers()
    count = Counter(claim.status for paper in every for claim in paper.claims)
    statuses = "\n".join(f"| {name} | {means} | {count[name]} |" for name, means in STATUSES.items())
    return "\n\n".join([HEAD.format(statuses=statuses), *(_section(paper) for paper in every)]) + "\n"


def _section(paper: Paper) -> str:
    rows = "\n".join(f"| {' | '.join(_cells(claim))} |" for claim in paper.claims)
    head = "| the paper | status | ours | rests on |\n|---|---|---|---|"
    return f"## {paper.title}\n\n{paper.source}.\n\n{head}\n{rows}"


def _cells(claim: Claim) -> tuple[str, ...]:
    constants = f"*Constants:* {claim.constants}" if claim.constants else ""
    why = f"*Why:* {claim.why}" if claim.why else ""
    ours = ". ".join(each for each in (claim.ours, constants, why) if each)
    command = [f"`{claim.command}`"] if claim.command else []
    rests = "; ".join([*map(_link, claim.rests), *command])
    return claim.says + KNOWN[claim.known], claim.status, ours, rests


def _link(rests: str) -> str:
    file, _, test = rests.partition("::")
    if test:
        return f"[`{test}`](../{file})"
    folder = Path(file.partition("#")[0]).parent.name
    return f"[{folder}](../{file})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
