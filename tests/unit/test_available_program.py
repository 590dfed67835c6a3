"""A program says how many workers there may be; what it says wrongly changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytempo.runs.elastic import available_program
from polytempo.runs.elastic.available_program import AvailableProgram


def says(path: Path, text: str) -> None:
    """Make `path` a program that is this line of the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def heard(available: AvailableProgram) -> int:
    """What it says once the program has ended."""
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


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such program"):
        AvailableProgram(tmp_path / "rooms", 3)
