"""Lines that are there before the next thing happens: in a file, and in the parts of an object."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest

from polytempo.core.system import files
from polytempo.core.system.durable_lines import PART_BYTES, DurableLines
from polytempo.core.system.url_path import UrlPath

LINE = b"x" * 99


@pytest.mark.parametrize("url", [False, True])
def test_lines_are_there_for_the_next_process(url: bool, tmp_path: Path) -> None:
    path = UrlPath("memory://durable-lines/a.jsonl") if url else tmp_path / "a.jsonl"
    lines = DurableLines(path)
    assert lines.read() == []
    lines.append(b"0")
    expected = [b"0"]
    for number in range(1, 5):  # one process reads before it appends, the next does not
        later = DurableLines(path)
        if number % 2:
            assert later.read() == expected
        later.append(b"%d" % number)
        expected.append(b"%d" % number)
    DurableLines(path).replace([b"7", b"8"])
    assert DurableLines(path).read() == [b"7", b"8"]
    later = DurableLines(path)
    later.replace([])
    later.append(b"9")
    assert DurableLines(path).read() == [b"9"]


def test_a_line_without_an_end_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    DurableLines(path).append(b"whole")
    with path.open("ab") as file:
        file.write(b"hal")
    assert DurableLines(path).read() == [b"whole"]
    DurableLines(path).append(b"next")
    assert path.read_bytes() == b"whole\nnext\n"
    assert path.stat().st_mode & 0o077 == 0
    DurableLines(path).replace([b"new"])
    assert path.stat().st_mode & 0o077 == 0
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"of others\n")
    path = tmp_path / "a.jsonl"
    path.symlink_to(other)
    with pytest.raises(OSError, match=r"a\.jsonl"):
        DurableLines(path).append(b"x")
    DurableLines(path).replace([b"x"])
    assert other.read_bytes() == b"of others\n"
    assert DurableLines(path).read() == [b"x"]


def test_an_object_is_put_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of five parts: an append puts a part at most, and a new start of the lines leaves none of them."""
    put, write = list[int](), UrlPath.write

    def writes(path: UrlPath, content: bytes) -> None:
        put.append(len(content))
        write(path, content)

    monkeypatch.setattr(UrlPath, "write", writes)
    path = UrlPath("memory://durable-parts/a.jsonl")
    lines, count = DurableLines(path), 5 * PART_BYTES // (len(LINE) + 1)
    for _ in range(count):
        lines.append(LINE)
    assert max(put) <= PART_BYTES + len(LINE) + 1
    assert path.parent.names() == ["a.jsonl", *(f"a.jsonl.{part}" for part in range(1, 5))]
    assert DurableLines(path).read() == [LINE] * count
    again = DurableLines(path)
    again.append(b"more")
    assert DurableLines(path).read() == [LINE] * count + [b"more"]
    DurableLines(path).replace([b"new"])
    assert path.parent.names() == ["a.jsonl"]
    assert DurableLines(path).read() == [b"new"]


def test_half_of_a_line_is_taken_off_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full in the midst of a line, and has room again for the next one."""
    path, write = tmp_path / "a.jsonl", files.write

    def fails(stream: BinaryIO, content: bytes, of: Path) -> None:
        write(stream, content[:3], of)
        raise OSError("the disk is full")

    lines = DurableLines(path)
    lines.append(b"first")
    with monkeypatch.context() as full:
        full.setattr(files, "write", fails)
        with pytest.raises(OSError, match="full"):
            lines.append(b"second")
    lines.append(b"third")
    assert DurableLines(path).read() == [b"first", b"third"]
