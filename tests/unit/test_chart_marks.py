"""Marks of faults, groups and diagnoses: their places on every axis, in the report's charts of loss and accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from live_pages import write_run
from polytempo.report.pages.page import page
from polytempo.report.pictures.marks import MOST_MARKS, ChartMark, marks_of, places
from polytempo.report.pictures.plots import curves
from polytempo.report.runs import load_run
from polytempo.report.status.records import CheckpointSaved, Diagnosis, GroupStatus, ProcessEvent, row_of
from polytempo.ui.of_run.run_columns import RunColumns
from report_runs import record

COLUMNS = {"step": [20.0, 10.0, 30.0], "seconds": [2.0, 1.0, 4.0], "samples": [200.0, 100.0, float("nan")]}
"""Rows of workers do not come in order, and one has no number of samples."""


@pytest.mark.parametrize(
    ("mark", "axis", "expected"),
    [
        (ChartMark("fault", "f", 15, 9.0), "step", 15),
        (ChartMark("fault", "f", 15, 9.0), "seconds", 1.5),
        (ChartMark("fault", "f", 25, 9.0), "seconds", 3.0),
        (ChartMark("fault", "f", 5, 9.0), "seconds", 1.0),
        (ChartMark("fault", "f", 90, 9.0), "samples", 200.0),
        (ChartMark("fault", "f", None, 3.0), "seconds", 3.0),
        (ChartMark("fault", "f", None, 3.0), "step", 25.0),
        (ChartMark("group", "g", None, None), "step", None),
        (ChartMark("fault", "f", 15, 9.0), "epoch", None),
    ],
)
def test_a_mark_is_placed_by_its_step_or_else_by_its_time(mark: ChartMark, axis: str, expected: float | None) -> None:
    assert places([mark], axis, COLUMNS) == [expected]


def test_without_rows_nothing_is_placed_but_the_known() -> None:
    mark = ChartMark("fault", "f", 15, 9.0)
    assert [places([mark], axis, {})[0] for axis in ("step", "seconds")] == [15, None]


def test_checkpoints_have_no_mark_in_a_report_and_marks_are_bounded() -> None:
    records = [CheckpointSaved(step=1, path="checkpoint/step-00000001"), *[GroupStatus(n, n, 2) for n in range(99)]]
    found = marks_of(records)
    assert len(found) == MOST_MARKS
    assert {mark.kind for mark in found} == {"group"}


def faulty(folder: Path, *events: Any) -> Path:
    """A run of four steps in two seconds, with these records in `events.jsonl`."""
    run = record()
    (folder / "result.json").write_text(json.dumps(run.result))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.metrics))
    (folder / "events.jsonl").write_text("".join(json.dumps(row_of(event)) + "\n" for event in events))
    return folder


EVENTS = [
    ProcessEvent("worker-1", "was <b>killed</b>", 9.0, "started again", step=3),
    Diagnosis(at_s=1.0, step=2, about="slow rank", who="rank-1", text="rank 1 is 31 % slower"),
]


@pytest.mark.parametrize(
    ("over", "expected"), [("seconds", [1500.0, 1000.0]), ("samples", [192.0, 128.0])], ids=["time", "samples"]
)
@pytest.mark.parametrize("quantity", ["loss", "accuracy"])
def test_the_charts_of_one_run_show_its_faults_and_diagnoses(
    tmp_path: Path, quantity: str, over: str, expected: list[float]
) -> None:
    run = load_run(faulty(tmp_path, *EVENTS))
    figure = curves([run], quantity, over)
    assert figure is not None
    scale = 1000.0 if over == "seconds" else 1.0
    signs = figure.data[-1]
    shown = [x / (1.0 if over == "samples" else 1.0 / scale) for x in signs["x"]]
    assert shown == pytest.approx(expected)
    assert [shape["x0"] for shape in figure.layout["shapes"]] == signs["x"]
    assert signs["marker"]["symbol"] == ["triangle-up", "square"]
    assert signs["text"][0] == "worker-1 was &lt;b&gt;killed&lt;/b&gt;; started again"


def test_the_page_names_the_marks_as_text_and_several_runs_have_none(tmp_path: Path) -> None:
    run = load_run(faulty(tmp_path, *EVENTS))
    shown = page([run], title="t")
    assert "step 3: worker-1 was &lt;b&gt;killed&lt;/b&gt;; started again" in shown
    assert "<b>killed" not in shown
    several = curves([run, record()], "loss", "seconds")
    assert several is not None
    assert "shapes" not in several.layout


def test_marks_of_the_live_page_are_on_every_axis(tmp_path: Path) -> None:
    """A run that is opened at its end has its rows before its events: a fault is not at the last step."""
    columns = RunColumns(write_run(tmp_path / "run"))
    columns.look()
    (fault,) = (mark for mark in columns.marks("step") if mark["kind"] == "fault")
    assert (fault["x"], fault["step"], fault["at_s"]) == (20.0, 20.0, 0.2)
    for axis in ("seconds", "epoch", "samples"):
        assert all(mark["x"] is not None for mark in columns.marks(axis))
    assert [mark["x"] for mark in columns.marks("bytes", 1200.0)] == pytest.approx([200.0, 200.0, 300.0, 500.0])
