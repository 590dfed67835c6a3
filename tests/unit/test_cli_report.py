"""`polytempo report`, one page about runs that have ended, by names that tell them apart; and `polytempo runs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import polytempo as pt
from command_output import asking
from polytempo.jobs.digits import job


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one strategy with two rates, and one of another strategy."""
    folder = tmp_path_factory.mktemp("runs")
    sync = pt.strategies.sync_sgd()
    pt.simulate(job, sync, 2, steps=6, lr=0.1, out=folder / "a" / "first")
    pt.simulate(job, sync, 2, steps=6, lr=0.01, out=folder / "b" / "first")
    pt.simulate(job, pt.strategies.local_sgd(period=2), 2, steps=6, out=folder / "other")
    return folder


asked = asking()


def test_runs_of_one_strategy_have_names_of_their_folders(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    names = [str(runs / name) for name in ("a/first", "b/first", "other")]
    out, _ = asked(capsys, "report", *names, "--out", str(page))
    rows = [line.split("  ")[0] for line in out.splitlines()]
    assert rows == [
        "strategy",
        "sync_sgd (simulated), a/first",
        "sync_sgd (simulated), b/first",
        "local_sgd (simulated)",
        f"report: {page}",
    ]
    text = page.read_text()
    assert "<title>digits: 3 runs</title>" in text
    assert "sync_sgd (simulated), a/first" in text


def test_one_run_has_the_title_of_its_strategy(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked(capsys, "report", str(runs / "other"), "--out", str(tmp_path / "page.html"))
    assert "<title>digits: local_sgd(period=2, route=native)</title>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["report", "RUNS"], "holds no result.json; name the folder of a run that has finished"),
        (["report", "no/where"], "there is no such folder"),
        (["report", "RUNS/other", "--out", "RUNS"], "is a folder; name a file, such as"),
        (["runs", "no/where"], "there is no such folder"),
        (["runs", "RUNS", "--sort", "speed"], "--sort speed: no run has it; there are accuracy, "),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], complaint: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, error = asked(capsys, *(each.replace("RUNS", str(runs)) for each in arguments), code=2)
    assert complaint in error


def test_runs_are_listed_and_sorted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = asked(capsys, "runs", str(runs), "--sort", "loss")
    header, *rows = [line.split() for line in out.splitlines()]
    assert header == ["run", "job", "strategy", "workers", "state", "steps", "loss", "accuracy", "seconds", "tags"]
    assert {row[0] for row in rows} == {"a/first", "b/first", "other"}
    assert {row[1] for row in rows} == {"digits"}
    found = json.loads(asked(capsys, "runs", str(runs), "--sort", "loss", "--json")[0])
    losses = [row["loss"] for row in found]
    assert losses == sorted(losses, reverse=True)
    assert [row["id"] for row in found] == [row[0] for row in rows]
    assert [row["id"] for row in json.loads(asked(capsys, "runs", str(runs), "--sort", "id", "--json")[0])] == [
        "a/first",
        "b/first",
        "other",
    ]


def test_a_folder_without_runs_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, "runs", str(tmp_path))[0] == f"no runs below {tmp_path}; train with --out {tmp_path}/NAME\n"
