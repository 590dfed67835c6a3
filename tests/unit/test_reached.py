"""Tests that a change reaches, in this repository: by imports, through packages that hand a name on, and by paths."""

from __future__ import annotations

from pathlib import Path

import pytest

import reached
from reached import changed

CASES: list[tuple[str, str, int]] = [
    ("tests/unit/test_reached.py", "tests/unit/test_reached.py", 0),
    ("src/polytempo/compression/codecs/natural.py", "tests/unit/test_codecs_drawn.py", 1),
    ("src/polytempo/strategies/local_sgd.py", "tests/laws/test_laws.py", 2),
    ("src/polytempo/cli/main.py", "tests/commands/test_cli_starts.py", 3),
    ("README.md", "tests/unit/test_readme.py", 1),
    ("native/kernels_isa.cpp", "tests/native/test_build.py", 1),
    ("tests/laws/catalogue.py", "tests/laws/test_laws.py", 1),
]
"""A path, a test that it reaches, and after how many imports at most: `test_cli_starts` goes by tests/warm.py."""


@pytest.mark.parametrize(("path", "test", "most"), CASES, ids=[path for path, *_ in CASES])
def test_reaches(path: str, test: str, most: int) -> None:
    assert reached.reached([path]).get(test, 99) <= most


def test_a_package_does_not_lead_to_all_that_it_exports() -> None:
    """`from polytempo.compression import natural` is not a use of `pca`."""
    of_natural, of_pca = (direct(f"src/polytempo/compression/codecs/{codec}.py") for codec in ("natural", "pca"))
    assert "tests/virtual/test_passing.py" in of_natural - of_pca
    assert "tests/unit/test_pca.py" in of_pca - of_natural


def direct(path: str) -> set[str]:
    return {test for test, distance in reached.reached([path]).items() if distance == 1}


def test_long_tests_come_later_unless_they_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest come first."""
    codec, long = "src/polytempo/compression/codecs/natural.py", "tests/virtual/test_residuals.py"
    reached.main([codec, "--later", long])
    assert long not in (named := capsys.readouterr().out.split())
    assert len(named) == reached.MOST
    reached.main([long, codec, "--later", long])
    assert long in capsys.readouterr().out.split()


def test_changed_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed are paths of commits since the branch began, of the working tree, and new ones, but no ignored ones."""
    monkeypatch.setattr(reached, "ROOT", tmp_path)
    git = reached.git
    git("init", "-q", "-b", "main")
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", ".")
    commit = ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m")
    git(*commit, "first")
    git("checkout", "-q", "-b", "other")
    (tmp_path / "a").write_text("committed")
    git(*commit, "second", "-a")
    (tmp_path / "b").write_text("not committed")
    for new in ("new", "ignored"):
        (tmp_path / new).touch()
    assert changed("main") == ["a", "b", "new"]
    assert changed("no such branch") == ["b", "new"]
