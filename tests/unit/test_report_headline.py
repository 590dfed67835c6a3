"""The headline: a comparison's finding, no more than its runs support."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polytempo.report.pages.headline import headline, remarks
from polytempo.report.runs import RunRecord

Tests = list[tuple[float, float]]

STEADY: Tests = [(1, 0.5), (2, 0.9), (3, 0.96), (4, 0.975), (5, 0.98)]
"""(seconds, accuracy); reaches 98 % in its fifth second, 97 % in its fourth."""


def run(strategy: str, tests: Tests, speed: float = 100.0, world: str = "process", **changed: Any) -> RunRecord:
    """A run with these tests, which ends with the last of them."""
    result = {
        "job": "digits",
        "strategy": strategy,
        "world": world,
        "workers": 2,
        "samples_per_s": speed,
        "loss": 0.1,
        "accuracy": tests[-1][1] if tests else None,
    }
    rows = [{"kind": "test", "seconds": seconds, "accuracy": accuracy} for seconds, accuracy in tests]
    return RunRecord(result | changed, rows, [])


def scaled(tests: Tests, seconds: float = 1.0, accuracy: float = 0.0) -> Tests:
    return [(at * seconds, value + accuracy) for at, value in tests]


TABLE: list[tuple[str, list[RunRecord], str]] = [
    ("no run", [], ""),
    ("a single run that says no time", [run("a", STEADY)], ""),
    (
        "a single run",
        [run("a", STEADY, seconds=5.0)],
        "a reaches 97 % after 4 s, and ends at 98.0 % accuracy after 5 s.",
    ),
    (
        "a single run of a job that measures no accuracy",
        [run("a", [], seconds=5.0)],
        "a ends with a loss of 0.1 after 5 s.",
    ),
    ("a single run that diverged", [run("a", STEADY, seconds=5.0, diverged="inf")], ""),
    (
        "sooner, at equal accuracy",
        [run("sync", STEADY), run("local", scaled(STEADY, 0.5))],
        "local reaches 98 % accuracy 2.0x sooner than sync (2.5 s instead of 5 s) and ends as accurate "
        "(98.0 %; sync 98.0 %).",
    ),
    (
        "half a point is equal",
        [run("sync", STEADY), run("local", scaled(STEADY, 0.5, -0.004))],
        "local reaches 97 % accuracy 2.0x sooner than sync (2 s instead of 4 s) and ends as accurate "
        "(97.6 %; sync 98.0 %).",
    ),
    (
        "sooner and better",
        [run("sync", STEADY), run("local", scaled(STEADY, 0.5, 0.01))],
        "local reaches 98 % accuracy 2.5x sooner than sync (2 s instead of 5 s) and ends more accurate "
        "(99.0 %; sync 98.0 %).",
    ),
    (
        "sooner, but worse in the end, is not left out",
        [run("sync", STEADY), run("rash", [(1, 0.98), (5, 0.9)])],
        "rash reaches 98 % accuracy 5.0x sooner than sync (1 s instead of 5 s), but ends at 90.0 % where sync ends at "
        "98.0 %.",
    ),
    (
        "who ends as accurate is named before who is sooner and ends worse",
        [run("sync", STEADY), run("rash", [(1, 0.98), (5, 0.9)]), run("local", scaled(STEADY, 0.5))],
        "local reaches 98 % accuracy 2.0x sooner than sync (2.5 s instead of 5 s) and ends as accurate "
        "(98.0 %; sync 98.0 %).",
    ),
    (
        "two winners, level with each other",
        [run("sync", STEADY), run("a", scaled(STEADY, 0.5)), run("b", scaled(STEADY, 0.51))],
        "a and b reach 98 % accuracy 2.0x sooner than sync (2.5 s instead of 5 s) and end as accurate "
        "(98.0 % and 98.0 %; sync 98.0 %).",
    ),
    (
        "one bad run does not lower the level",
        [run("sync", STEADY), run("local", scaled(STEADY, 0.5)), run("bad", scaled(STEADY, 0.1, -0.3))],
        "local reaches 98 % accuracy 2.0x sooner than sync (2.5 s instead of 5 s) and ends as accurate "
        "(98.0 %; sync 98.0 %).",
    ),
    (
        "a tie: the tests are too far apart to tell",
        [run("sync", STEADY), run("ring", scaled(STEADY, 0.9))],
        "ring and sync reach 98 % accuracy at about the same time (4.5 s and 5 s, tested now and then).",
    ),
    (
        "the baseline is first",
        [run("sync", STEADY), run("ring", scaled(STEADY, 3)), run("star", scaled(STEADY, 4))],
        "sync reaches 98 % accuracy first, 3.0x sooner than ring, the next (5 s instead of 15 s).",
    ),
    (
        "none but the baseline gets there",
        [run("sync", STEADY), run("bad", scaled(STEADY, 0.1, -0.3)), run("worse", scaled(STEADY, 0.1, -0.4))],
        "sync alone reaches 97 % accuracy; bad comes nearest, with 68.0 %.",
    ),
    (
        "one test each says nothing about when: rates are compared",
        [run("sync", [(5, 0.98)], 100), run("local", [(2.5, 0.978)], 200)],
        "local processes 2.0x as many samples per second as sync and ends as accurate (97.8 %; sync 98.0 %).",
    ),
    (
        "faster to a worse end",
        [run("sync", [(5, 0.98)], 100), run("local", [(2.5, 0.97)], 1234)],
        "local processes 12x as many samples per second as sync, but ends at 97.0 % where sync ends at 98.0 %.",
    ),
    (
        "without any accuracy",
        [run("sync", [], 100), run("local", [], 200)],
        "local processes 2.0x as many samples per second as sync.",
    ),
    (
        "the baseline is fastest",
        [run("sync", [], 300), run("ring", [], 200), run("star", [], 100)],
        "sync processes 1.5x as many samples per second as ring, the next.",
    ),
    (
        "equally fast",
        [run("sync", [], 100), run("ring", [], 104)],
        "ring and sync process about as many samples per second as each other.",
    ),
    ("nothing was processed", [run("sync", [], 0), run("ring", [], 0)], ""),
    (
        "the run with one worker is the baseline",
        [run("two", scaled(STEADY, 0.5)), run("one", STEADY, workers=1)],
        "two reaches 98 % accuracy 2.0x sooner than one (2.5 s instead of 5 s) and ends as accurate "
        "(98.0 %; one 98.0 %).",
    ),
    ("virtual seconds are not real ones", [run("a", STEADY), run("b", scaled(STEADY, 0.5), world="virtual")], ""),
    (
        "two simulated runs",
        [run("a", STEADY, world="virtual"), run("b", scaled(STEADY, 0.5), world="virtual")],
        "On the virtual clock, b reaches 98 % accuracy 2.0x sooner than a (2.5 s instead of "
        "5 s) and ends as accurate (98.0 %; a 98.0 %).",
    ),
    ("different jobs", [run("a", STEADY), run("b", scaled(STEADY, 0.5), job="mnist")], ""),
    ("one of two diverged", [run("a", STEADY), run("b", STEADY, diverged="at step 3")], ""),
    (
        "where the baseline diverged the next one stands in",
        [run("a", STEADY, loss=math.nan), run("b", STEADY), run("c", scaled(STEADY, 0.5))],
        "c reaches 98 % accuracy 2.0x sooner than b (2.5 s instead of 5 s) and ends as accurate (98.0 %; b 98.0 %).",
    ),
    (
        "an accuracy of zero",
        [run("a", [(1, 0.0), (2, 0.0)]), run("b", [(1, 0.0), (2, 0.0)], 200)],
        "b processes 2.0x as many samples per second as a and ends as accurate (0.0 %; a 0.0 %).",
    ),
    (
        "strategies are named as short as tells them apart",
        [run("sync_sgd(route=native)", STEADY), run("local_sgd(period=8, route=native)", scaled(STEADY, 0.5))],
        "local_sgd reaches 98 % accuracy 2.0x sooner than sync_sgd (2.5 s instead of 5 s) and ends as accurate "
        "(98.0 %; sync_sgd 98.0 %).",
    ),
]


@pytest.mark.parametrize(("runs", "sentence"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_headline(runs: list[RunRecord], sentence: str) -> None:
    assert headline(runs).replace("\u00a0", " ").replace("\u00d7", "x") == sentence


def test_the_order_of_the_others_changes_nothing() -> None:
    runs = [run("a", STEADY), run("b", scaled(STEADY, 0.5)), run("c", scaled(STEADY, 0.25))]
    assert {headline([runs[0], *rest]) for rest in (runs[1:], runs[:0:-1])} == {headline(runs)}


@pytest.mark.parametrize(
    ("runs", "sentences"),
    [
        ([run("a", STEADY), run("b", scaled(STEADY, 1, -0.02))], []),
        (
            [run("a", STEADY), run("b", scaled(STEADY, 1, -0.03))],
            ["Far below the most accurate run (a, 98.0 %): b ends at 95.0 %."],
        ),
        (
            [run("a", STEADY), run("b", [(at, 0.1 * at) for at in range(1, 6)]), run("c", [(1, 0.5)])],
            [
                "Far below the most accurate run (a, 98.0 %): b ends at 50.0 %, and was still rising: more epochs may "
                "help; c ends at 50.0 %."
            ],
        ),
        (
            [run("a", STEADY), run("b", [(1, 0.1), (2, 0.9), (3, 0.7), (4, 0.4), (5, 0.5)])],
            [
                "Far below the most accurate run (a, 98.0 %): b ends at 50.0 %, after 90.0 % at its best: its steps "
                "may be too large, so try a smaller --lr."
            ],
        ),
        (
            [run("a", STEADY), run("b", STEADY, diverged="rank 1, step 3: the loss is NaN")],
            ["b diverged: rank 1, step 3: the loss is NaN."],
        ),
        ([run("a", STEADY, loss=math.inf)], ["a diverged: its loss is not finite."]),
        ([run("a", [])], []),
    ],
)
def test_remarks_on_runs_that_went_wrong(runs: list[RunRecord], sentences: list[str]) -> None:
    assert [sentence.replace("\u00a0", " ") for sentence in remarks(runs)] == sentences


def test_a_resumed_run_says_what_is_of_its_last_part() -> None:
    resumed = run("a", STEADY, seconds=5.0, resumed_at=1200)
    assert [each for each in remarks([resumed]) if "resumed at step 1,200" in each]
    assert remarks([run("a", STEADY, seconds=5.0, resumed_at=None)]) == []
