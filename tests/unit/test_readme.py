"""What the documents say: their code runs, their commands parse, and what they point to exists."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import warm
from polytempo.cli.main import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
RUNS = ("train", "compare", "simulate")

# Where a file that a document names may lie; a folder is written with a slash at its end.
PLACES = (ROOT, ROOT / "src", ROOT / "src/polytempo", ROOT / "tests", ROOT / "benchmarks")
NAMED = re.compile(r"`((?:[\w.-]+/)+|(?:[\w.-]+/)*[\w-]+\.(?:py|md|txt|toml|css|js))`")
LEFT_BY_A_RUN = ("checkpoint/", "logs/", "runs/")


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The lines of console blocks that call `polytempo`."""
    lines = [line for block in blocks("console", text) for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ polytempo")]


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


ALL_COMMANDS = [command for document in DOCUMENTS for command in commands(read(document))]


@pytest.mark.parametrize("code", blocks("python"), ids=["own-loop", "job", "strategy"])
def test_code_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "from_readme.py"
    script.write_text(code, encoding="utf-8")
    done = warm.run([script.name], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_strategy_shown_is_the_whole_file() -> None:
    assert read("src/polytempo/strategies/local_sgd.py") in blocks("python")


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=lambda command: command.partition("  ")[0])
def test_a_command_is_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path/to/mnist").mkdir(parents=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)[1:]
    answer = CliRunner().invoke(app, [*words, "--dry-run" if words[0] in RUNS else "--help"])
    expected = README.partition(f"$ {command}\n")[2].partition("\n")[0]
    if expected.startswith("error: "):
        assert (answer.exit_code, answer.stderr.strip()) == (2, expected)
    else:
        assert answer.exit_code == 0, answer.output


def shortened(command: str) -> list[str]:
    """The words of a command that does the same in less time: few steps or seeds, quick measurements."""
    words = shlex.split(command, comments=True)[1:]
    if words[0] == "chaos":
        return ["chaos", "--seeds", "2", "--processes", "1"]
    if words[0] == "bench":
        return [*words, "--quick"]
    if words[0] in RUNS and "--until" not in words and "--steps" not in words:
        return [*words, "--steps", "8" if "--resume" in words else "4"]
    return words


@pytest.mark.process
def test_the_commands_work_one_after_the_other(tmp_path: Path) -> None:
    """In one folder that is empty at first: those that share a run's folder; with README_ALL=1 (`make soak`) all."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    every = bool(os.environ.get("README_ALL"))
    if every:
        (tmp_path / "path/to").mkdir(parents=True)
        (tmp_path / "path/to/mnist").symlink_to(Path(os.environ["POLYTEMPO_DATA"], "mnist"))
    chosen = [command for command in commands(README) if every or re.search(r"\bruns/", command)]
    assert len(chosen) >= 4
    for command in chosen:
        refused = README.partition(f"$ {command}\n")[2].startswith("error: ")
        done = warm.run(["-m", "polytempo", *shortened(command)], tmp_path, timeout=300)
        assert done.returncode == (2 if refused else 0), f"{command}: {done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", read(document), flags=re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_pictures_exist(document: str) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", read(document))]
    assert [link for link in links if link and "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(document: str) -> None:
    missing = [
        name
        for name in NAMED.findall(read(document))
        if name not in LEFT_BY_A_RUN and not any((place / name).exists() for place in PLACES)
    ]
    assert missing == []


def test_the_readme_begins_with_the_two_commands() -> None:
    first = "\n".join(README.splitlines()[:10])
    assert "make demo" in first
    assert "make test" in first
