"""`polytempo tune threads`: every way to ask wrongly, and the sentences below its table."""

from __future__ import annotations

from typing import Any

import pytest

from command_output import asking
from polytempo.cli.bench.tune_threads import verdict


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digits", "--cores", "0"], "--cores 0: must be a "),
        (["digits", "--cores", "100000"], "--cores 100000: this process may use "),
        (["digits", "--rounds", "0"], "--rounds 0: must be a "),
        (["digits", "--turn-s", "-1"], "--turn-s -1: must be a "),
        (["digits", "--batch-size", "4", "--global-batch-size", "8"], "leave one out"),
        (["digits", "--cores", "2", "--global-batch-size", "1"], "2 workers would not have a sample each"),
        (["digitz"], "digits"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in asking("tune", "threads")(capsys, *arguments, code=2)[1]


def result(low: float, **missing: str) -> dict[str, Any]:
    best = {"workers": 2, "threads": 1, "inter_threads": 4}
    return {"best": best, "margin": {"median": 1.082, "low": low, "high": 1.1}, "missing": missing}


def test_the_verdict_names_the_command_and_how_sure_it_is() -> None:
    assert verdict("mine.py:job", result(1.05)) == [
        "best: polytempo train mine.py:job --workers 2 --threads 1 --inter-threads 4",
        "8.2 % more samples a second than the next",
    ]
    assert verdict("digits", result(0.98, inter_threads="no branches"))[1:] == [
        "8.2 % more samples a second than the next; rounds differ by as much, so either may be the best",
        "not measured: --inter-threads above 1: no branches",
    ]
