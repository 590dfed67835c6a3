"""A run that cannot start, or is ended while it starts: one message, an exit code, and nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm

pytestmark = pytest.mark.process

HEAD = "import dataclasses, os, signal\nfrom polytempo.jobs.digits import job as digits\n"
ENDING = """
def model():
    rank, size = os.environ.get("POLYTEMPO_RANK"), os.environ.get("POLYTEMPO_SIZE")
    if rank == "0" and (size == "1") == {rehearsal}:  # one signal: a second one would not wait for the end
        os.kill(os.getppid(), signal.{name})
        signal.pause()
    return digits.model()

job = dataclasses.replace(digits, model=model)
"""


def train(folder: Path, source: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`polytempo train job.py:job` in an empty folder, with a folder for temporary files of its own."""
    (folder / "job.py").write_text(HEAD + source)
    (folder / "tmp").mkdir()
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder / "tmp")
    try:
        return warm.run(["-m", "polytempo", "train", "job.py:job", "--steps", "2", *more], folder)
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before


def left(folder: Path) -> list[str]:
    """The command's files, in its folder and among temporary files, except for Python's and torch's own."""
    found = [path.relative_to(folder) for path in folder.rglob("*")]
    theirs = ("__pycache__", "torchinductor_")
    return sorted(str(path) for path in found if not any(part.startswith(theirs) for part in path.parts))


@pytest.mark.parametrize(
    ("strategy", "rehearsal", "name", "code"),
    [("sync_sgd", True, "SIGTERM", 143), ("sync_sgd", False, "SIGINT", 130), ("ssp", False, "SIGTERM", 143)],
)
def test_a_signal_while_starting_ends_the_run(
    tmp_path: Path, strategy: str, rehearsal: bool, name: str, code: int
) -> None:
    done = train(tmp_path, ENDING.format(rehearsal=rehearsal, name=name), "--workers", "3", "--strategy", strategy)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.splitlines()[-1] == {143: "terminated", 130: "interrupted"}[code]
    assert "Traceback" not in done.stderr
    assert left(tmp_path) == ["job.py", "tmp"]


def test_a_mistake_in_a_job_is_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    done = train(tmp_path, "job = dataclasses.replace(digits, loss=lambda output, target: (output - 1) ** 2)\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: job digits: loss(output, target) returned a tensor of shape (32, 10)")
    assert done.stderr.count("\n") == 1
    assert left(tmp_path) == ["job.py", "tmp"]


def test_files_of_the_current_folder_are_not_imported_for_a_job_that_ships(tmp_path: Path) -> None:
    """Also where a picture's backend is unknown, which matters to no run."""
    for name in ("torch", "numpy", "yaml", "matplotlib", "typing_extensions"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')\n")
    run = [sys.executable, "-m", "polytempo", "train", "digits", "--dry-run"]
    environment = {**os.environ, "MPLBACKEND": "nothing"}
    ended = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_an_exception_at_a_later_step_has_the_job_s_lines_and_none_of_ours(tmp_path: Path) -> None:
    """The files that training had written by then stay. Before the first step it is said that a batch is all of the
    data."""
    loss = (
        "count = 0\n"
        "def loss(output, target):\n"
        "    global count\n"
        "    count += 1\n"
        "    if count > 30:\n"
        "        raise KeyError('late')\n"
        "    return digits.loss(output, target)\n"
        "job = dataclasses.replace(digits, loss=loss)\n"
    )
    done = train(tmp_path, loss, "--workers", "1", "--steps", "60", "--batch-size", "1500")
    assert "note: a step of 1 worker with batch size 1500 asks for 1,500 samples, and there are 1,437" in done.stderr
    assert (done.returncode, done.stdout) == (1, "")
    assert "job digits: loss(output, target) raised KeyError: 'late'; output is float32 (1437, 10)" in done.stderr
    assert 'job.py", line 8, in loss' in done.stderr
    assert "src/polytempo" not in done.stderr
    assert "runs/job.py-job-sync_sgd/metrics.jsonl" in left(tmp_path)
    assert not any(path.startswith("tmp/") for path in left(tmp_path))


def test_too_many_workers_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    """A million are more processes than Linux numbers by default, and more memory than a machine has."""
    done = train(tmp_path, "job = digits\n", "--workers", "1000000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: workers=1000000 needs")
    assert "or simulate that many" in done.stderr
    assert left(tmp_path) == ["job.py", "tmp"]
