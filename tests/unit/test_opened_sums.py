"""A client's record of opened sums: in its folder, for its next process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from polytempo.core.errors import PolytempoError
from polytempo.runs.clients import opened_sums
from polytempo.runs.clients.opened_sums import OpenedSums


def test_the_next_process_opens_a_round_for_the_same_clients_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state/client"
    with closing(OpenedSums(folder)) as first:
        assert first.admits("3 a", 7, {0, 1, 2}, [])
        assert first.admits("4 a", 8, {0, 1}, [])
    with closing(OpenedSums(folder)) as second:
        assert not second.admits("3 a", 9, {0, 1}, [])
        assert not second.admits("3 a", 9, {0, 1}, [8])
        assert second.admits("3 a", 9, {2, 1, 0}, [])
        assert second.admits("4 a", 10, {1}, [8])
        assert second.admits("4 b", 11, {5}, [])
    with closing(OpenedSums(folder)) as third:
        assert not third.admits("4 a", 12, {0, 1}, [8])
        assert third.admits("4 a", 12, {0, 1}, [10])
        with pytest.raises(PolytempoError, match="another process is the client"):
            OpenedSums(folder)
    [path] = folder.glob("*.jsonl")
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("kept", [True, False])
def test_the_oldest_rounds_are_forgotten_and_the_file_is_bounded(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_sums, "MOST_SUMS", 4)
    sums = OpenedSums(tmp_path if kept else None)
    for number in range(30):
        assert sums.admits(f"{number} a", number, {0, number}, [])
        assert sums.admits(f"{number} a", number, {0, number}, [])
        if kept:
            assert len((tmp_path / "opened.jsonl").read_bytes().splitlines()) <= 8
    sums.close()
    later = OpenedSums(tmp_path) if kept else sums
    assert [later.admits(f"{number} a", 99, {7}, []) for number in (26, 27, 28, 29, 25)] == [False] * 4 + [True]
    later.close()


def test_shares_are_not_given_before_the_record_is_written(tmp_path: Path) -> None:
    sums = OpenedSums(tmp_path)
    (tmp_path / "opened.jsonl").mkdir()
    with pytest.raises(OSError, match="opened"):
        sums.admits("3 a", 7, {0, 1}, [])
    sums.close()


def test_a_record_that_cannot_be_read_lets_no_client_begin(tmp_path: Path) -> None:
    (tmp_path / "opened.jsonl").write_text("junk\n")
    for _ in range(2):
        with pytest.raises(PolytempoError, match="not a record of opened sums"):
            OpenedSums(tmp_path)
