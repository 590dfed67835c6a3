"""The file beside a plan's page, and its place in the list of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from live_pages import write_run
from polytempo.report.saved_plan import MOST_RUNS, SavedForecast, read_plan, write_plan
from polytempo.ui.run_list import RunList

RUN: dict[str, Any] = {
    "strategy": "sync_sgd()",
    "workers": 2,
    "batch_size": 32,
    "seconds": 9.0,
    "low_s": 8.0,
    "high_s": 12.0,
    "money": 0.1,
}
PLAN: dict[str, Any] = {
    "job": "digits",
    "cluster": "ethernet",
    "until": {"accuracy": 0.97},
    "winner": RUN,
    "front": [RUN],
    "forecasts": [RUN] * (MOST_RUNS + 1),
    "noise": 3.0,
}


def saved(folder: Path, name: str = "plan.html") -> Path:
    return write_plan(folder / name, PLAN, "host hours", ["two workers."], ["polytempo train digits"])


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = saved(tmp_path)
    plan = read_plan(path)
    assert path == tmp_path / "plan.plan.json"
    assert (plan.job, plan.until, plan.unit, plan.commands) == (
        *("digits", {"accuracy": 0.97}, "host hours"),
        ["polytempo train digits"],
    )
    assert plan.front == [plan.winner] == [msgspec.convert(RUN, SavedForecast)]
    assert len(plan.forecasts) == MOST_RUNS


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000, '{"format": "polytempo-plan", "version": 2}', "\x00"])
def test_another_file_is_one_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.plan.json").write_text(content)
    with pytest.raises(ValueError, match=r"is not a plan of `polytempo plan"):
        read_plan(tmp_path / "x.plan.json")


def test_plans_among_the_runs_are_listed_and_others_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "plans").mkdir()
    path = saved(tmp_path / "plans")
    (tmp_path / "broken.plan.json").write_text("{")
    (tmp_path / "link.plan.json").symlink_to(path)
    runs = RunList(tmp_path)
    assert [row["id"] for row in runs.look()] == ["a"]
    assert [(plan["id"], plan["job"]) for plan in runs.plans] == [("plans/plan.plan.json", "digits")]
    first = runs.plans[0]
    runs.look()
    assert runs.plans[0] is first, "an unchanged plan is not read again"
    path.unlink()
    runs.look()
    assert runs.plans == []
