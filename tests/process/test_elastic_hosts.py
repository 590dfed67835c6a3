"""Elastic runs over several hosts: each host is an agent here, and groups go through gloo, as they do between hosts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.core.system.notice import PREEMPTED
from polytempo.engines.ssh_engine import Ssh
from polytempo.report.status.live_status import read_status
from polytempo.runs.elastic.run_elastic import ElasticLauncher, run_elastic
from polytempo.runs.run_collective import run_collective
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from process.elastic_stories import trains_with, watching
from process.test_elastic import job
from process.test_remote_engine import agent_pids, children_of

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("none_left_by_agents")]

EPOCHS = 15
STRATEGY = "sync_sgd(route=invariant(slices=5))"
OWN = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from process.test_elastic import job as made
job = made({hurry})
"""


def named(folder: Path, name: str, hurry: Path | None) -> pt.Job:
    """The job of `test_elastic` as agents find it: by its file."""
    text = OWN.format(tests=str(Path(__file__).parents[1]), hurry=f"Path({str(hurry)!r})" if hurry else None)
    (folder / name).write_text(text)
    return pt.jobs.find(f"{folder}/{name}:job")


def members_of(launcher: ElasticLauncher) -> tuple[int, ...]:
    """The present members."""
    assert launcher.view is not None
    return launcher.view.members


def host_of(launcher: ElasticLauncher, life: int) -> int:
    """The number of the agent that has started it."""
    process: Any = launcher.processes[life]
    return int(process.agent.number)


def is_left(launcher: ElasticLauncher, host: int) -> Iterator[None]:
    """Until three workers on other hosts have made a step."""
    while (
        len(members_of(launcher)) != 3
        or any(host_of(launcher, life) == host for life in members_of(launcher))
        or not launcher.is_training
    ):
        yield


def test_hosts_leave_fall_silent_and_die_and_the_weights_are_the_calm_runs(tmp_path: Path) -> None:
    """Host 2 gets SIGTERM; host 1 stops as a whole, comes back when it is given up, gets a worker and is killed."""
    hurry, out = tmp_path / "hurry", tmp_path / "run"

    def story(launcher: ElasticLauncher) -> Iterator[None]:
        agents = agent_pids(os.getpid())
        yield from trains_with(launcher, 3)
        os.kill(agents[2], signal.SIGTERM)
        yield from is_left(launcher, 2)
        assert not any(change["lost"] for change in launcher.history.changes)
        silent = [agents[1], *children_of(agents[1])]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in silent:
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                yield from is_left(launcher, 1)
        launcher._engine.stop(launcher.processes[members_of(launcher)[0]])
        while all(host_of(launcher, life) != 1 for life in members_of(launcher)) or not launcher.is_training:
            yield  # its place is taken on the host that has come back
        os.kill(agents[1], signal.SIGKILL)
        yield from is_left(launcher, 1)

    strategy, options = pt.parse_strategy(STRATEGY), RunOptions(epochs=EPOCHS, seed=2, timeout_s=60.0)
    calm = run_collective(RunSpec.of(job(), strategy, 3, options), pt.engines.local())
    elastic = RunOptions(epochs=EPOCHS, seed=2, timeout_s=60.0, min_workers=1, max_workers=4, out=out)
    engine = Ssh(
        ("a", "b", "c"),
        python=sys.executable,
        command=("env", "HOST={host}"),
        address="127.0.0.1",
        environment={"POLYTEMPO_NATIVE": "0"},
    )
    result = run_elastic(
        RunSpec.of(named(tmp_path, "own.py", hurry), strategy, 3, elastic), engine, None, None, watching(story, hurry)
    )
    assert hurry.exists(), "the run was over before the story"
    assert result.parameters_sha256 == calm.parameters_sha256
    assert result.ledger == calm.ledger
    assert result.membership is not None
    assert any(change["lost"] for change in result.membership)
    status = read_status(out)
    assert status is not None
    assert status.group is not None
    assert status.group.generation == result.membership[-1]["generation"]
    assert {"joined", "left", "was killed by SIGKILL"} <= {event.how for event in status.events}


def test_a_launcher_that_gets_sigterm_saves_one_step_and_the_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    out = tmp_path / "run"
    how: dict[str, Any] = {"min_workers": 1, "max_workers": 3, "seed": 2, "out": out}

    sent: list[int] = []

    def watch(launcher: ElasticLauncher) -> None:
        """Another group than the first one saves it."""
        process: Any = launcher.processes[1]
        if launcher.is_training and not sent:
            sent.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
        elif launcher.is_training and len(sent) == 1 and 1 not in members_of(launcher):
            sent.append(os.getpid())
            os.kill(os.getpid(), signal.SIGTERM)

    child = os.fork()
    if not child:
        code = 1
        try:
            options = RunOptions(epochs=EPOCHS, **how)
            slow = job(tmp_path / "never")
            run_elastic(RunSpec.of(slow, pt.parse_strategy(STRATEGY), 3, options), pt.engines.local(), watch=watch)
        except SystemExit as error:
            code = int(str(error.code))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == PREEMPTED
    status = read_status(out)
    assert status is not None
    assert status.state == "preempted"
    resumed = pt.run(job(), pt.parse_strategy(STRATEGY), 3, epochs=EPOCHS, resume=True, **how)
    calm = pt.run(job(), pt.parse_strategy(STRATEGY), 3, epochs=EPOCHS, seed=2)
    assert resumed.parameters_sha256 == calm.parameters_sha256
