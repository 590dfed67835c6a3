"""Metrics: every row is on the disk when it is written, and a crash costs at most the row being written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.rows import read_metrics
from polytempo.runs.served.tally import Tally


def rows(*steps: int) -> list[dict[str, Any]]:
    return [{"kind": "train", "step": step, "loss": 1.0 / step} for step in steps]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *steps: int, resumed_at: int | None = None) -> None:
    with MetricsWriter(path.parent, resumed_at=resumed_at) as metrics:
        for row in rows(*steps):
            metrics.write(row)


def test_each_row_is_readable_before_the_file_is_closed(path: Path) -> None:
    with MetricsWriter(path.parent) as metrics:
        assert read_metrics(path.parent) == []
        for number, row in enumerate(rows(1, 2, 3), start=1):
            metrics.write(row)
            assert read_metrics(path.parent) == rows(1, 2, 3)[:number]
    metrics.close()  # twice is harmless


def test_a_new_run_starts_an_empty_file(path: Path) -> None:
    write(path, 1, 2)
    write(path, 5)
    assert read_metrics(path.parent) == rows(5)


@pytest.mark.parametrize(("resumed_at", "kept"), [(0, []), (2, [1, 2]), (3, [1, 2, 3]), (9, [1, 2, 3])])
def test_a_resumed_run_drops_the_rows_that_it_writes_again(path: Path, resumed_at: int, kept: list[int]) -> None:
    write(path, 1, 2, 3)
    write(path, resumed_at + 1, resumed_at=resumed_at)
    assert read_metrics(path.parent) == rows(*kept, resumed_at + 1)


def test_a_resumed_run_without_metrics_starts_an_empty_file(path: Path) -> None:
    write(path, 8, resumed_at=7)
    assert read_metrics(path.parent) == rows(8)


def test_any_cut_of_the_last_line_leaves_the_others(path: Path) -> None:
    write(path, 1, 2, 3)
    content = path.read_bytes()
    begin = content[:-1].rindex(b"\n") + 1
    for end in range(begin, len(content) - 2):
        path.write_bytes(content[:end])
        assert read_metrics(path.parent) == rows(1, 2)
    write(path, 3, resumed_at=2)
    assert read_metrics(path.parent) == rows(1, 2, 3)


@pytest.mark.parametrize("broken", [b"{", b"7", b"\x00\x00", b"\xff"])
def test_a_broken_line_before_the_last_is_an_error(path: Path, broken: bytes) -> None:
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: .*; remove that line"):
        read_metrics(path.parent)


def test_numbers_that_are_not_finite_become_null(path: Path) -> None:
    with MetricsWriter(path.parent) as metrics:
        metrics.write({"step": 1, "loss": math.nan, "samples_per_s": math.inf})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"step": 1, "loss": None, "samples_per_s": None}


def test_rows_of_a_served_run_count_from_its_first_work_as_its_seconds_do() -> None:
    """Processes took two seconds to start; the run was resumed after ten seconds of work."""
    told: list[dict[str, Any]] = []
    spec = SimpleNamespace(options=SimpleNamespace(until={}), workers=2, strategy=SimpleNamespace(stages=1))
    batches = SimpleNamespace(size=8)
    program: Any = SimpleNamespace(spec=spec, plan=SimpleNamespace(service=None), batches=batches, precision=None)
    coordinator: Any = SimpleNamespace(scheduler=None, began_s=2.0)
    before: Any = SimpleNamespace(step=40, seconds=10.0)
    for run_before in (None, before):
        tally = Tally(program, coordinator, told.append, run_before)
        tally.take_row({"kind": "train", "step": 41, "seconds": 2.5, "loss": 1.0})
    assert [row["seconds"] for row in told] == [0.5, 10.5]
