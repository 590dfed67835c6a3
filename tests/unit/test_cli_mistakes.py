"""Mistakes on the command line that once had no answer, a wrong one, or no end."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import polytempo
from polytempo.cli.main import app


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chaos", "--processes", "100000", "--seeds", "100000"], "error: --processes 100000: must be at most "),
        (
            ["simulate", "digits", "--workers", "1000000", "--steps", "1"],
            "error: 1437 samples cannot be dealt to 1000000",
        ),
        (["simulate", "digits", "--cluster", "ethernet(gbit_per_s=-1)"], "error: gbit_per_s must be a number above 0"),
        (["train", "digits", "--workers", "1000000"], "error: workers=1000000 needs "),
        (["train", "raises.py:job"], "error: job raises.py:job: reading its file raised ZeroDivisionError: division"),
        (["explain", "sync_sgd", "--job", "raises.py:job"], "error: job raises.py:job: reading its file raised Zero"),
        (["train", "raises.py"], "error: job raises.py: reading its file raised ZeroDivisionError: division by zero"),
        (
            ["replay", "broken"],
            "error: broken has no record of messages; and broken/result.json cannot be read as JSON: ",
        ),
        (["train", "digits", "--out", "taken"], "error: --out taken: this folder holds other files (notes.txt)"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_it_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/result.json").write_text("{")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").touch()
    done = CliRunner().invoke(app, words)
    assert done.exit_code in (1, 2), done.output
    assert done.stderr.startswith(message)
    assert not (tmp_path / "runs").exists()


def test_the_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output.strip()) == (0, polytempo.__version__)
