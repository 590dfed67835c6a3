"""A run that dies ends with a line that names the first culprit, under torchrun's, Slurm's and our own launcher.

`benchmarks/deaths` has the rows, and runs fifty of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import warm

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "deaths" / "main.py"
ROWS = (
    "static torchrun, replicas: raise on 0",
    "static torchrun, replicas: hang on 0",
    "static torchrun, joined: NaN",
    "Slurm, replicas: kill on 0",
    "pt.run, sync_sgd(): kill",
    "subprocess, sync_sgd(): stop",
)


def test_the_last_line_names_the_first_failure(tmp_path: Path) -> None:
    ended = warm.run([str(PROGRAM), "--only", *ROWS, "--patience-s", "300"], tmp_path, timeout=500)
    assert ended.stdout.endswith(f"{len(ROWS)} of {len(ROWS)} end with the culprit's name\n"), ended.stdout
    assert (tmp_path / "runs" / "deaths" / "tables.md").read_text().count("\n") == len(ROWS) + 2
