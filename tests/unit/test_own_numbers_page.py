"""The page's section about the user's own numbers: charts, pictures, texts, and markup that stays text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from polytempo.report.pages.own_numbers import MOST_CHARTS, own_curves, own_line
from polytempo.report.pages.page import page
from polytempo.report.runs import RunRecord, load_run
from polytempo.report.status.records import Diagnosis, Logged, LoggedImage, LoggedText, StreamRecord, row_of
from polytempo.training.observe.png import png
from report_runs import record

HOSTILE = "<script>alert('x')</script>"


def run_of(folder: Path, *logged: StreamRecord, **changed: Any) -> RunRecord:
    """The run of `report_runs` with these records, read back from its folder."""
    run = record(**changed)
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps(run.result))
    rows = [*run.metrics, *map(row_of, logged)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_run(folder)


def test_numbers_are_lines_over_steps_and_workers_are_averaged(tmp_path: Path) -> None:
    alone = run_of(tmp_path, *(Logged(step=step, values={"own": step / 2, "other": 1.0}) for step in (3, 1, 2)))
    assert own_line(alone, "own") == [(1.0, 0.5), (2.0, 1.0), (3.0, 1.5)]
    of_two = [Logged(step=step, values={"own": float(worker)}, worker=worker) for step in (1, 2) for worker in (0, 4)]
    assert own_line(run_of(tmp_path, *of_two), "own") == [(1.0, 0.0), (1.0, 2.0), (2.0, 2.0), (2.0, 2.0)]


def test_a_page_has_a_chart_of_each_number_and_bounds_their_count(tmp_path: Path) -> None:
    values = {f"n{number:02d}": 1.0 for number in range(MOST_CHARTS + 3)}
    shown = page([run_of(tmp_path, Logged(step=1, values=values))], title="t")
    assert len(re.findall(r"<h3>n\d\d</h3>", shown)) == MOST_CHARTS
    assert "3 more are in metrics.jsonl." in shown
    assert "Your own numbers" not in page([record()], title="t")


def test_a_diagnosis_is_a_mark_at_its_step(tmp_path: Path) -> None:
    slow = Diagnosis(at_s=1.0, step=2, about="slow rank", who="rank-1", text="rank 1 is 31 % slower")
    run = run_of(tmp_path, Logged(step=1, values={"own": 1.0}), Logged(step=3, values={"own": 2.0}), slow)
    [mark] = own_curves([run], "own").layout["shapes"]
    assert (mark["x0"], mark["x1"]) == (2, 2)
    assert "step 2: rank 1 is 31 % slower" in page([run], title="t")


def test_pictures_and_texts_are_in_the_page_the_last_of_each_name(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    pictures = []
    for step in (1, 2):
        path = f"images/digit-{step}.png"
        (tmp_path / path).write_bytes(png(torch.full((2, 2, 1), step, dtype=torch.uint8)))
        pictures.append(LoggedImage(name="digit", step=step, path=path))
    words = [LoggedText(name="sample", step=step, text=f"text {step}") for step in (1, 2)]
    run = run_of(tmp_path, *pictures, *words)
    assert [(picture.name, picture.step) for picture in run.pictures] == [("digit", 2)]
    shown = page([run, run], title="t")
    assert shown.count("data:image/png;base64,") == 2
    assert "text 2" in shown
    assert "text 1" not in shown


def test_markup_of_a_hostile_folder_is_shown_as_text_and_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "secret.png").write_bytes(png(torch.zeros((2, 2, 1), dtype=torch.uint8)))
    (tmp_path / "images" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "images" / "page.png").write_text(HOSTILE)
    run = run_of(
        tmp_path / "run",
        Logged(step=1, values={HOSTILE: 1.0}),
        LoggedText(name=HOSTILE, step=1, text=HOSTILE),
        Diagnosis(at_s=1.0, step=1, about="slow rank", who="rank-1", text=HOSTILE),
    )
    assert HOSTILE not in page([run], title="t")
    forged = [LoggedImage(name=name, step=1, path=f"images/{name}.png") for name in ("link", "page", "absent")]
    assert run_of(tmp_path, *forged).pictures == ()
