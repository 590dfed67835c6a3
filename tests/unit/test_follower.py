"""Following a run's metrics: each row is shown once, when its line is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from object_store import bucket
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.rows import RowFollower


def test_rows_are_shown_once_and_only_when_their_line_is_whole(tmp_path: Path) -> None:
    shown: list[Any] = []
    metrics = tmp_path / "metrics.jsonl"
    follower = RowFollower(tmp_path, shown.append)
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


def test_a_broken_line_ends_no_run(tmp_path: Path) -> None:
    shown: list[Any] = []
    broken: list[bytes] = []
    content = b'{"step": 1}\n{"st\n' + b"[" * 100_000 + b'\n{"loss": NaN}\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_bytes(content)
    RowFollower(tmp_path, shown.append, earlier=True, on_broken=lambda line, error: broken.append(line)).look()
    assert [row["step"] for row in shown] == [1, 2]
    assert [line[:4] for line in broken] == [b'{"st', b"[[[[", b'{"lo']
    with pytest.raises((ValueError, RecursionError)):
        RowFollower(tmp_path, shown.append, earlier=True).look()


@pytest.mark.parametrize("at_url", [False, True])
def test_a_file_that_was_written_again_is_read_from_its_begin(at_url: bool, tmp_path: Path) -> None:
    """Another run in the folder may write more than the reader has read, into a file with the same number."""
    shown: list[Any] = []
    run: Place = UrlPath(bucket(tmp_path)) if at_url else tmp_path
    path = run / "metrics.jsonl"
    follower = RowFollower(run, shown.append)
    for content in (b'{"step": 1}\n', b'{"step": 10}\n{"step": 20}\n'):
        path.write(content) if isinstance(path, UrlPath) else path.write_bytes(content)
        follower.look(last=True)
    assert [row["step"] for row in shown] == [1, 10, 20]


def test_a_resumed_run_shows_what_it_keeps_once(tmp_path: Path) -> None:
    shown: list[Any] = []
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write({"step": step})
    follower = RowFollower(tmp_path, shown.append)
    follower.look()
    assert shown == []
    with MetricsWriter(tmp_path, resumed_at=2) as writer:
        follower.look()
        writer.write({"step": 3})
        follower.look()
    assert [row["step"] for row in shown] == [1, 2, 3]


def test_a_broken_line_is_an_error(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    follower = RowFollower(tmp_path, lambda row: None)
    metrics.write_bytes(b"{broken\n")
    with pytest.raises(ValueError, match="Expecting"):
        follower.look()
