"""README and documentation: their code runs, their commands parse, and their links exist."""

from __future__ import annotations

import os
import re
import runpy
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import polytempo as pt
import warm
from polytempo import strategies
from polytempo.cli.main import app
from some_cases import some_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = tuple(sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md") if "generated" not in page.parts))
"""The documentation's pages as written; `make docs` adds generated pages."""
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES)
RUNS = ("train", "compare", "simulate")

# The possible places of a file that a document names; a folder ends with a slash.
PLACES = (ROOT, ROOT / "src", ROOT / "src/polytempo", ROOT / "tests", ROOT / "benchmarks")
NAMED = re.compile(r"`((?:[\w.-]+/)+|(?:[\w.-]+/)*[\w-]+\.(?:py|md|txt|toml|css|js))`")
MADE_LATER = ("trial-000/", "checkpoint/", "logs/", ".tails/", "runs/", "own_job.py", "docs/generated/")

BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?^```(\w+)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
"""A fenced block. A comment before it says why a block is not run, and that is the only way for one not to be."""


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced blocks of one language that are run."""
    return [code for reason, name, code in BLOCK.findall(text) if name == language and not reason]


def commands(text: str) -> list[str]:
    """The lines of console blocks that call `polytempo`."""
    lines = [line for block in blocks("console", text) for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ polytempo")]


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


COMMANDS = [(document, command) for document in DOCUMENTS for command in commands(read(document))]


def in_a_folder(tmp_path: Path) -> Path:
    """A folder with the files that the documents' commands need."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize("code", blocks("python"), ids=["own-loop", "job"])
def test_code_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "from_readme.py"
    script.write_text(code, encoding="utf-8")
    done = warm.run([script.name], tmp_path)
    assert done.returncode == 0, done.stderr


WITH_CODE = [page for page in PAGES if set(blocks("python", read(page))) - set(blocks("python"))]


@pytest.mark.process
@pytest.mark.parametrize("page", some_of(WITH_CODE, 0, of=1))
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """A page's blocks run one after the other: later ones may use names of earlier ones. Without all cases some run."""
    script = tmp_path / "from_page.py"
    script.write_text("\n".join(blocks("python", read(page))), encoding="utf-8")
    done = warm.run([script.name], tmp_path)
    assert done.returncode == 0, f"{page}: {done.stderr}"


@pytest.mark.parametrize("document", ["README.md", *PAGES])
def test_a_console_block_has_only_commands_that_are_checked(document: str) -> None:
    """A console block has only `polytempo`'s commands, or a reason for not running."""
    lines = [line for block in blocks("console", read(document)) for line in block.splitlines()]
    assert [line for line in lines if line.startswith("$ ") and not line.startswith("$ polytempo ")] == []


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=lambda given: given.partition("  ")[0])
def test_a_command_is_understood(document: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path/to/mnist").mkdir(parents=True)
    monkeypatch.chdir(in_a_folder(tmp_path))
    words = shlex.split(command, comments=True)[1:]
    extra = ["--dry-run"] if words[0] in RUNS else [] if words[0] in ("explain", "strategies") else ["--help"]
    answer = CliRunner().invoke(app, [*words, *extra])
    expected = read(document).partition(f"$ {command}\n")[2].partition("\n")[0]
    if expected.startswith("error: "):
        assert answer.exit_code == 2, answer.output
        assert answer.stderr.strip() == expected, f"copy the command's error into {document}: {answer.stderr}"
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


EVERY = bool(os.environ.get("README_ALL"))


def run_in_one_folder(document: str) -> list[str]:
    """Commands that share a run's folder; with README_ALL=1 (`make soak`) all."""
    return [command for command in commands(read(document)) if EVERY or re.search(r"\bruns/", command)]


@pytest.mark.process
@pytest.mark.parametrize("document", some_of([each for each in DOCUMENTS if run_in_one_folder(each)], 0, of=1))
def test_the_commands_work_one_after_the_other(document: str, tmp_path: Path) -> None:
    """The folder is empty at first. Without all cases some documents' commands run."""
    in_a_folder(tmp_path)
    if EVERY:
        (tmp_path / "path/to").mkdir(parents=True)
        (tmp_path / "path/to/mnist").symlink_to(Path(os.environ["POLYTEMPO_DATA"], "mnist"))
    for command in run_in_one_folder(document):
        refused = read(document).partition(f"$ {command}\n")[2].startswith("error: ")
        done = warm.run(["-m", "polytempo", *shortened(command)], tmp_path, timeout=300)
        assert done.returncode == (2 if refused else 0), f"{command}: {done.stderr}"


def test_some_commands_share_a_folder() -> None:
    """Otherwise the test above would pass without running any."""
    assert sum(len(run_in_one_folder(document)) for document in DOCUMENTS) >= 6


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", read(document), flags=re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_pictures_exist(document: str) -> None:
    """Anchors, and pages that are generated, are checked by `make docs`."""
    folder = (ROOT / document).parent
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", without_blocks(read(document)))]
    inside = [link for link in links if link and "://" not in link and "generated/" not in link]
    assert [link for link in inside if not (folder / link).exists()] == []


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *PAGES])
def test_files_that_are_named_exist(document: str) -> None:
    missing = [
        name
        for name in NAMED.findall(read(document))
        if name not in MADE_LATER and not any((place / name).exists() for place in PLACES)
    ]
    assert missing == []


def test_the_readme_is_read_in_a_minute() -> None:
    lines = README.splitlines()
    first = "\n".join(lines[:11])
    assert len(lines) <= 150
    assert "make demo" in first
    assert "make test" in first


def test_every_strategy_is_in_the_table() -> None:
    """The page that lists them has one row for each."""
    listed = re.findall(r"^\| `(\w+)` \|", read("docs/strategies/index.md"), flags=re.MULTILINE)
    wrong = set(listed) ^ set(strategies.__all__)
    assert sorted(listed) == sorted(strategies.__all__), f"docs/strategies/index.md: one row each for {wrong or 'all'}"
    number = len(strategies.__all__)
    for page, text in (
        ("README.md", f"with {number} distributed strategies"),
        ("README.md", f"lists the {number} "),
        ("docs/index.md", f"with {number} distributed strategies"),
    ):
        assert text in read(page), f"{page} does not say {text!r}: correct the number of strategies there"


def test_every_page_is_in_a_contents() -> None:
    """The theme shows the site's contents beside each page; a page outside it is not found."""
    entries = [
        entry
        for page in PAGES
        for block in re.findall(r"```{toctree}\n(.*?)```", read(page), flags=re.DOTALL)
        for entry in (f"{Path(page).parent}/{line}.md" for line in block.splitlines() if re.match(r"[a-z]", line))
    ]
    assert set(PAGES) - set(entries) == {"docs/index.md"}


def test_the_pictures_are_what_the_simulator_draws() -> None:
    """`python docs/pictures/draw.py` draws the pictures."""
    drawn = runpy.run_path(str(DOCS / "pictures/draw.py"))["pictures"]()
    committed = {file.stem: file.read_text(encoding="utf-8") for file in (DOCS / "pictures").glob("*.svg")}
    assert [name for name in {**drawn, **committed} if drawn.get(name) != committed.get(name)] == []


def test_the_caption_has_the_numbers_of_the_picture() -> None:
    """`python docs/pictures/compare.py` draws it; its steps, bytes and virtual seconds are the same everywhere."""
    drawn = runpy.run_path(str(DOCS / "pictures/compare.py"))
    caption = " ".join(README.partition("docs/compare.png)\n\n*")[2].partition("*")[0].split())
    found = re.search(
        r"take ([\d.]+) s where synchronous SGD takes ([\d.]+) s, .* send ([\d.]+) MB, not ([\d.]+) MB.* the (\d+) ",
        caption,
    )
    assert found is not None, caption
    local_s, synchronous_s, local_mb, synchronous_mb, steps = map(float, found.groups())
    job = replace(pt.jobs.find("digits"), data=lambda path: pt.Data(pt.data.digits().train))  # scores take no time
    expected = {drawn["SYNCHRONOUS"]: (synchronous_s, synchronous_mb)}
    expected |= dict.fromkeys((drawn["LOCAL"], drawn["OUTER"]), (local_s, local_mb))
    for strategy, (seconds, megabytes) in expected.items():
        result = pt.simulate(job, pt.parse_strategy(strategy), **drawn["OPTIONS"])
        assert result.steps == steps
        assert f"{result.seconds:.3f}" == f"{seconds:.3f}", strategy
        assert f"{result.bytes_sent_per_rank / 1e6:.1f}" == f"{megabytes:.1f}", strategy
