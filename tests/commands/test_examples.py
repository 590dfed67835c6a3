"""Every file of `examples/` runs, and has something to show. A new example is found automatically. Without all cases,
some of them run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import warm
from some_cases import some_of

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
UNDER_TORCHRUN = {
    "horovod_digits.py": "worker",
    "horovod_imagenet.py": "worker",
    "hybrid_layers.py": "worker",
    "own_loop.py": "worker",
    "own_loop_served.py": "worker",
    "pipeline.py": "stage",
    "pipeline_served.py": "stage",
    "pipeline_split.py": "worker",
    "placed_branches.py": "part",
    "split_layers.py": "part",
    "trainer.py": "worker",
}
QUOTED = ("simulate_stragglers.py",)
"""docs/simulator.md quotes its output word for word; under the virtual clock it is the same everywhere."""

pytestmark = pytest.mark.process


def shown_by(command: list[str], folder: Path) -> str:
    """A command's standard output; it must succeed and leave nothing in the folder."""
    done = warm.run(command, folder)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.mark.parametrize("example", some_of(EXAMPLES, 0, of=1), ids=lambda path: path.name)
def test_an_example_runs_and_shows_something(example: Path, tmp_path: Path) -> None:
    shown = shown_by([str(example)], tmp_path)
    assert shown.strip()
    if example.name in QUOTED:
        assert f"```text\n{shown}```" in (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", some_of(list(UNDER_TORCHRUN), 0, of=1))
def test_it_is_one_of_two_workers_under_torchrun(name: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert f"2 {UNDER_TORCHRUN[name]}(s)" in shown_by([*torchrun, str(ROOT / "examples" / name)], tmp_path)


@pytest.mark.parametrize(("file", "name"), [("own_job.py", "waves"), ("ragged_text.py", "ragged_text")])
def test_the_job_in_an_example_is_found_from_the_command_line(file: str, name: str, tmp_path: Path) -> None:
    job = f"{ROOT / 'examples' / file}:job"
    assert name in shown_by(["-m", "polytempo", "train", job, "--dry-run"], tmp_path)


def test_every_strategy_has_an_example() -> None:
    """One of its own, or a line in its family's."""
    strategies = {path.stem for path in (ROOT / "src/polytempo/strategies").glob("*.py")} - {"__init__"}
    of_families = (
        "async_diloco.py",
        "compressed_sgd.py",
        "layers_in_parts.py",
        "local_strategies.py",
        "pipeline_strategies.py",
    )
    families = [ROOT / "examples" / name for name in of_families]
    named = {name for each in families for name in re.findall(r"strategies\.(\w+)\(", each.read_text(encoding="utf-8"))}
    missing = strategies - {path.stem for path in EXAMPLES} - named
    assert not missing, f"write examples/NAME.py for {sorted(missing)}, or a line in one of {', '.join(of_families)}"
