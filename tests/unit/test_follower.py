"""Following a run's metrics: each row is shown once, when its line is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polytempo.report.status.follower import MetricsFollower
from polytempo.report.status.metrics import MetricsWriter


def test_rows_are_shown_once_and_only_when_their_line_is_whole(tmp_path: Path) -> None:
    shown: list[Any] = []
    metrics = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(metrics, shown.append)
    follower.look()
    assert shown == []
    with metrics.open("ab", buffering=0) as stream:
        for written, expected in [
            (b'{"step": 1}\n{"st', [1]),
            (b'ep": 2}', [1]),
            (b"\n", [1, 2]),
            (b'{"step": 3}\n{"step": 4}\n', [1, 2, 3, 4]),
            (b"", [1, 2, 3, 4]),
        ]:
            stream.write(written)
            follower.look()
            assert [row["step"] for row in shown] == expected


def test_lines_that_were_read_are_not_read_again(tmp_path: Path) -> None:
    shown: list[Any] = []
    metrics = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(metrics, shown.append)
    with metrics.open("w+b", buffering=0) as stream:
        stream.write(b'{"step": 1}\n')
        follower.look()
        stream.seek(0)
        stream.write(b"not JSON   \n" + b'{"step": 2}\n')
        follower.look()
    assert [row["step"] for row in shown] == [1, 2]


def test_a_resumed_run_shows_what_it_keeps_once(tmp_path: Path) -> None:
    shown: list[Any] = []
    metrics = tmp_path / "metrics.jsonl"
    with MetricsWriter(metrics) as writer:
        for step in (1, 2, 3):
            writer.write({"step": step})
    follower = MetricsFollower(metrics, shown.append)
    follower.look()
    assert shown == []
    with MetricsWriter(metrics, resumed_at=2) as writer:
        follower.look()
        writer.write({"step": 3})
        follower.look()
    assert [row["step"] for row in shown] == [1, 2, 3]


def test_a_broken_line_is_an_error(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(metrics, lambda row: None)
    metrics.write_bytes(b"{broken\n")
    with pytest.raises(ValueError, match="Expecting"):
        follower.look()
