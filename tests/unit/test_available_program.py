"""A program gives the number of available workers; wrong output changes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from polytempo.runs.elastic import available_program
from polytempo.runs.elastic.available_program import AvailableProgram


def says(path: Path, text: str) -> None:
    """Make `path` a program that is this line of the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def heard(available: AvailableProgram) -> int:
    """The program's number, once it has ended."""
    available()
    assert available._process is not None
    available._process.wait(30)
    return available()


def test_the_last_number_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(available_program, "_EVERY_S", 0.0)
    program = tmp_path / "rooms"
    says(program, "echo 5")
    available = AvailableProgram(program, 3)
    assert heard(available) == 5
    for text, complaint in (("echo many", "printed 'many', and not a number"), ("exit 7", "exit code 7")):
        says(program, text)
        assert heard(available) == heard(available) == 5
        assert capsys.readouterr().err.count(complaint) == 1
    available.close()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (r"printf '\\377\\000\\033'", "and not a number"),
        ("yes", "it prints more than 1 MiB"),
        ("exec /nowhere", "exit code"),
    ],
)
def test_nonsense_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    program = tmp_path / "rooms"
    says(program, text)
    available = AvailableProgram(program, 3)
    available()
    while available._process is not None:
        assert available() == 3
    assert complaint in capsys.readouterr().err


def test_it_is_not_waited_for_and_what_it_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(available_program, "_EVERY_S", 0.0)
    program, other = tmp_path / "rooms", tmp_path / "other"
    says(program, f"tail -f /dev/null & echo $! > {other}.new; mv {other}.new {other}; echo 5")
    available = AvailableProgram(program, 3)
    assert heard(available) == 5, "another program holds its output"
    os.kill(int(other.read_text()), signal.SIGKILL)
    other.unlink()
    says(program, f"tail -f /dev/null & echo $! > {other}.new; mv {other}.new {other}; wait")
    while not other.exists():
        assert available() == 5
    monkeypatch.setattr(available_program, "_LONGEST_S", 0.0)
    assert available() == 5
    assert available._process is None
    assert "it takes more than 0 s" in capsys.readouterr().err
    status = Path(f"/proc/{other.read_text().strip()}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        pass  # it has been killed
    available.close()


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"available=.*/rooms: there is no such program"):
        AvailableProgram(tmp_path / "rooms", 3)
    (tmp_path / "rooms").write_text("echo 3")
    with pytest.raises(ValueError, match=r"cannot be run as a program: chmod \+x .*/rooms"):
        AvailableProgram(tmp_path / "rooms", 3)
