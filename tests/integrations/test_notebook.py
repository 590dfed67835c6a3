"""A notebook in a real Jupyter kernel: runs are shown below their cells, and workers are forked beside its threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CELLS = {
    "import": "import threading, torch, polytempo as pt",
    "simulate": "pt.simulate('digits', 'local_sgd(period=8)', 4, epochs=1)",
    "run": "pt.run('digits', 'local_sgd(period=8)', 2, epochs=1, threads=1)",
    "gradients": "x = torch.randn(64, 64, requires_grad=True); (x @ x).sum().backward(); threading.active_count() > 1",
    "served": "pt.run('digits', 'downpour()', 2, epochs=1)",
    "own": (
        "def data(path):\n    return pt.jobs.find('digits').data(path)\n"
        "from dataclasses import replace\n"
        "pt.run(replace(pt.jobs.find('digits'), data=data, origin=None), 'sync_sgd()', 2, epochs=1)"
    ),
    "compare": "pt.compare('digits', ['sync_sgd()', 'local_sgd(period=8)'], 2, epochs=1)",
    "refused": "pt.run('digits', 'sync_sgd()', 0)",
    "again": "pt.run('digits', 'sync_sgd()', 2, epochs=1).steps",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of each cell, after one kernel has executed all.

    The client is another process, because it leaves sockets open.
    """
    folder = tmp_path_factory.mktemp("notebook")
    spec = folder / "kernels" / "here"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "here", "language": "python"}))
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    nbformat.write(notebook, folder / "cells.ipynb")
    execute = [
        sys.executable,
        "-c",
        "from nbclient.cli import main; main()",
        "--inplace",
        "--allow-errors",
        "--timeout",
        "200",
    ]
    done = subprocess.run(
        [*execute, "--kernel_name", "here", "cells.ipynb"],
        cwd=folder,
        env=os.environ | {"JUPYTER_PATH": str(folder), "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["cells.ipynb", "kernels"]
    notebook = nbformat.read(folder / "cells.ipynb", as_version=4)
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def shown(outputs: list[Any], kind: str) -> list[str]:
    return [each.data["text/html"] for each in outputs if each.output_type == kind]


@pytest.mark.parametrize("cell", ["simulate", "run", "served", "own"])
def test_a_cell_shows_the_run_and_its_result(outputs: dict[str, list[Any]], cell: str) -> None:
    assert [each for each in outputs[cell] if each.output_type in ("error", "stream")] == []
    (view,), (table,) = shown(outputs[cell], "display_data"), shown(outputs[cell], "execute_result")
    assert "<polyline" in view
    assert "accuracy" in table
    assert "<script" not in view + table


def test_the_kernel_has_threads(outputs: dict[str, list[Any]]) -> None:
    assert outputs["gradients"][0].data["text/plain"] == "True"


def test_a_comparison_is_shown_run_by_run_and_as_one_table(outputs: dict[str, list[Any]]) -> None:
    first, second = shown(outputs["compare"], "display_data")
    assert "[1/2]" in first
    assert "[2/2]" in second
    (table,) = shown(outputs["compare"], "execute_result")
    assert table.count("<tr") == 3


def test_a_refusal_is_an_error_and_the_kernel_goes_on(outputs: dict[str, list[Any]]) -> None:
    assert [each.output_type for each in outputs["refused"]] == ["error"]
    assert outputs["again"][-1].data["text/plain"] == "23"
