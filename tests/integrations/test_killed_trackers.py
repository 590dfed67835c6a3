"""A run is killed with SIGKILL: its tracker is readable and has the rows of the run, which goes on in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from integrations.test_trackers import (
    Points,
    comet_points,
    mlflow_points,
    points,
    trackio_points,
    trackio_project,
    wandb_points,
)
from polytempo.report.status.rows import read_metrics
from waiting import soon

pytestmark = [pytest.mark.process, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
LONG_S = 200.0
PROGRAM = """
import sys
import time
from dataclasses import replace
from pathlib import Path
import polytempo as pt
from polytempo.spec.tracker_call import parse_tracker
from polytempo.trackers import table, tracked
out, text, place, epochs = sys.argv[1:]
tracked.FINISH_S = 100.0
tracker = table.made(parse_tracker(text)) if place == "here" else text
if type(tracker).__name__ == "CometRun":
    sys.modules[type(tracker).__module__].PART_S = 0.5
job = pt.jobs.find("digits")
def loss(output, target):
    time.sleep(0.02)  # no more rows than a library takes
    return job.loss(output, target)
pt.run(
    replace(job, loss=loss), "local_sgd(period=8)", 2, epochs=int(epochs), checkpoint_every=20, out=out,
    resume=Path(out).exists(), trackers=[tracker],
)
"""


class Library(NamedTuple):
    """A tracker, and its own reader."""

    tracker: str
    read: Callable[[Path], tuple[set[str], Points]]
    """The tracked runs by their names in the library, and their numbers."""


LIBRARIES = {
    "wandb": Library("wandb:project=p,mode=offline", lambda folder: wandb_points(folder / "run")),
    "mlflow": Library(
        "mlflow:uri=sqlite:///m.db,experiment=e", lambda folder: mlflow_points(f"sqlite:///{folder}/m.db")
    ),
    "comet": Library("comet:project=p,mode=offline", lambda folder: comet_points(folder / "run")),
    "trackio": Library("trackio:project=p", lambda folder: trackio_points(folder.name)),
}


def alive(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, _, its = (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
            except OSError:  # it ended meanwhile
                continue
            if int(its) == session and state not in "ZX":
                found.append(int(entry.name))
    return found


def given(out: Path) -> int:
    """The last step with scores that the tracker was given."""
    steps = [json.loads(each.read_text())["steps"] for each in out.glob("trackers/*.json")]
    return int(steps[0].get("test/None", 0)) if steps else 0


def scored(out: Path) -> int:
    """The number of rows about tests."""
    return len(points(out)["test/loss"]) if (out / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize("killed", ["the launcher", "all processes"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_killed_run_is_readable_and_goes_on(
    name: str, killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes: the tracker is in the launcher's own, so that all that its library has not written is lost."""
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    project = trackio_project(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    out, (text, read) = tmp_path / "run", LIBRARIES[name]
    text = text.replace("project=p", f"project={project}")
    beside = killed == "the launcher"
    command = [sys.executable, "-c", PROGRAM, str(out), text, "beside" if beside else "here"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen([*command, "1000"], env=alone, start_new_session=True)
    try:
        assert soon(lambda: (out / "trackers").is_dir() and (scored(out) if beside else given(out)) > 0, LONG_S)
        for process in [launcher.pid] if beside else alive(launcher.pid):
            os.kill(process, signal.SIGKILL)
        launcher.wait(LONG_S)
        assert soon(lambda: not alive(launcher.pid), LONG_S)
    finally:
        for process in alive(launcher.pid):
            os.kill(process, signal.SIGKILL)
    written, last = points(out), given(out)
    runs, found = read(tmp_path)
    assert len(runs) == 1
    for name, values in written.items():
        assert found[name].items() <= values.items()
        assert found[name].keys() >= {step for step in values if beside or step <= last}
    epochs = max(int(row.get("epoch", 0)) for row in read_metrics(out)) + 2
    subprocess.run([*command, str(epochs)], env=alone, check=True, timeout=LONG_S)
    resumed, (again, found) = points(out), read(tmp_path)
    assert again == runs
    for name, values in resumed.items():
        assert found[name].keys() >= values.keys()
        assert all(value in (written[name].get(step), values.get(step)) for step, value in found[name].items())
