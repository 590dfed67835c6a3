"""Attacks on real runs that log in each step: processes killed between two rows, and a full disk.

The stream stays readable, and the run goes on or ends with its error.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import polytempo as pt
import warm
from polytempo.errors import PolytempoError, WorkerDied
from polytempo.jobs import find
from polytempo.report.status.records import Diagnosis, Logged, ProcessEvent, RunFinished, StreamRecord
from polytempo.report.status.stream import follow, stream

pytestmark = pytest.mark.process

s = pt.strategies
RUNS: dict[str, tuple[pt.Strategy, dict[str, Any]]] = {
    "collective": (s.sync_sgd(), {}),
    "elastic": (s.sync_sgd(), {"min_workers": 1}),
    "served": (s.async_sgd(), {}),
}
STEPS, AT = 12, 7


def job(then: Callable[[], object] = lambda: None) -> pt.Job:
    """Digits, which logs a number and a text in each step; from a process's step `AT` on it calls `then`."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        found = nn.functional.cross_entropy(output, target)
        pt.log(own=found)
        pt.training.log_text("text", "x" * 3000)
        pt.training.log_image("image", output.detach().sigmoid())
        calls += 1
        if calls >= AT:
            then()
        return found

    return replace(find("digits"), loss=loss)


def of_kind(records: list[StreamRecord], kind: type) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


@pytest.mark.parametrize("kind", RUNS)
def test_a_worker_that_is_killed_between_two_rows(kind: str, tmp_path: Path) -> None:
    """One of two workers dies, perhaps rank 0, which writes the rows."""
    strategy, more = RUNS[kind]

    def die() -> None:
        try:
            os.close(os.open(tmp_path / "dead", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    out = tmp_path / "run"
    if kind == "collective":
        with pytest.raises(WorkerDied, match="SIGKILL"):
            pt.run(job(die), strategy, 2, steps=STEPS, out=out, **more)
    else:
        pt.run(job(die), strategy, 2, steps=STEPS, out=out, **more)
    records = stream(out)
    assert [each.state for each in of_kind(records, RunFinished)] == ["failed" if kind == "collective" else "finished"]
    told = of_kind(records, Diagnosis if kind == "collective" else ProcessEvent)
    assert any("SIGKILL" in (each.text if kind == "collective" else each.how) for each in told)
    steps = [each.step for each in of_kind(records, Logged)]
    assert set(range(1, AT + 1)) <= set(steps) <= set(range(1, STEPS + 2))


PROGRAM = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import polytempo as pt
from polytempo.report.status.records import CheckpointSaved
from polytempo.report.status.stream import stream
from process.test_attacked_runs import RUNS, job

def kill():
    start, *records = stream(out)
    if any(isinstance(each, CheckpointSaved) for each in records):
        os.kill(start.pid, signal.SIGKILL)

out = Path("run")
strategy, more = RUNS[sys.argv[1]]
pt.run(job(kill), strategy, 2, steps=100_000, epochs=100_000, out=out, checkpoint_every=4, **more)
"""


@pytest.mark.parametrize("kind", ["collective", "served"])
def test_a_launcher_that_is_killed_between_two_rows(kind: str, tmp_path: Path) -> None:
    """A reader that follows the run ends. A resume goes on in the same stream."""
    (tmp_path / "program.py").write_text(PROGRAM)
    assert warm.run(["program.py", kind, str(Path(__file__).parents[1])], tmp_path).returncode == -signal.SIGKILL
    out = tmp_path / "run"
    records = list(follow(out))
    assert of_kind(records, RunFinished) == []
    steps = max(each.step for each in of_kind(records, Logged)) + 4
    strategy, more = RUNS[kind]
    result = pt.run(job(), strategy, 2, steps=steps, epochs=100_000, out=out, resume=True, **more)
    assert result.resumed_at
    after = stream(out)
    assert of_kind(after, RunFinished) == [RunFinished(state="finished")]
    if kind == "collective":
        logged = [each.step for each in of_kind(after, Logged)]
        assert logged == list(range(1, steps + 1)), "each once, also where a resume begins"


def may_mount() -> bool:
    """True if this process may mount a file system (CAP_SYS_ADMIN)."""
    status = Path("/proc/self/status")
    found = re.search(r"CapEff:\s*([0-9a-f]+)", status.read_text()) if status.exists() else None
    return found is not None and bool(int(found[1], 16) >> 21 & 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


if may_mount():

    @pytest.mark.parametrize("kind", RUNS)
    def test_a_run_on_a_disk_that_is_full(kind: str, small_disk: Path) -> None:
        """Rows, pictures and notes in logs have no room any more, and the run goes on to the file that it needs."""
        strategy, more = RUNS[kind]
        with pytest.raises(PolytempoError, match=r"No space left on device(.|\n)*PT3001(.|\n)*free space there"):
            pt.run(job(), strategy, 2, steps=2 * STEPS, out=small_disk / "run", **more)
        steps = {each.step for each in of_kind(stream(small_disk / "run"), Logged)}
        assert 1 in steps
        assert steps <= set(range(1, 2 * STEPS + 2))
