"""The slurm engine on two nodes: real daemons on this host (Debian: slurmctld, slurmd, slurm-client, munge)."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import polytempo as pt
from engines.batch_runs import (
    DETERMINISTIC,
    LONG_S,
    SAMPLES,
    SERVED,
    agents,
    awaited,
    begun,
    digits,
    hash_here,
    marked,
    processes,
    result,
    rows,
    train,
)
from engines.slurm_cluster import queue, slurm_cluster
from polytempo.engines.on_slurm.allocation import granted

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

_SOON_S = 10


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Slurm's variables; its daemons have no mark, and end with the tests."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture(autouse=True)
def mark(cluster: dict[str, str]) -> Iterator[str]:
    """A test's processes have ended after it, and no job is left in the queue."""
    with marked() as mark:
        os.environ |= cluster
        yield mark
        awaited(lambda: not queue(cluster), "the end of all jobs")


@pytest.mark.parametrize("strategy", DETERMINISTIC)
def test_two_nodes_reach_the_bits_of_this_host(strategy: str, tmp_path: Path) -> None:
    """The engine asks for the allocation; the logs of both workers come back."""
    found = digits(strategy, pt.engines.slurm(nodes=2), out=tmp_path / "run")
    assert found.parameters_sha256 == hash_here(strategy)
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} >= {"rank-0.log", "rank-1.log"}


def test_a_parameter_server_on_two_nodes_outlives_an_agent(tmp_path: Path, mark: str) -> None:
    """Every sample of 20 epochs counts once, though an agent is killed with all its processes."""
    command = [*train("--epochs=20", f"--strategy={SERVED}"), "--engine=slurm:nodes=2"]
    with begun(command, tmp_path / "run") as process:
        os.kill(agents(mark)[-1], signal.SIGKILL)
        said = process.communicate(timeout=3 * LONG_S)[0]
        assert process.returncode == 0, said
    assert result(tmp_path / "run")["samples"] == 20 * SAMPLES


def test_a_synchronous_run_that_loses_an_agent_ends_and_says_so(tmp_path: Path, mark: str) -> None:
    command = [*train("--epochs=10000"), "--engine=slurm:nodes=2"]
    with begun(command, tmp_path / "run") as process:
        os.kill(agents(mark)[-1], signal.SIGKILL)
        said = process.communicate(timeout=LONG_S)[0]
        assert process.returncode == 1
        assert "is lost" in said or "ended with its agent on" in said  # whichever is seen first


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_job_and_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """The fixture looks; the allocation is given back although it has no time limit. After SIGTERM the run is saved."""
    with begun([*train("--epochs=10000"), "--engine=slurm:nodes=2"], tmp_path / "run") as process:
        process.send_signal(number)
        process.communicate(timeout=LONG_S)
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGKILL: -9}[number]


def test_inside_an_allocation_the_engine_takes_that_one(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["salloc", "--nodes=2", *train("--epochs=2", "--engine=slurm", f"--out={out}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert result(out)["parameters_sha256"] == hash_here("sync_sgd()")


def test_another_jobs_allocation_is_joined_and_stays() -> None:
    with granted(["--nodes=2"], LONG_S) as allocation:
        found = digits("sync_sgd()", pt.engines.slurm(job=allocation.job))
        assert found.parameters_sha256 == hash_here("sync_sgd()")
        assert queue(dict(os.environ)) == [f"{allocation.job} RUNNING"]


def test_a_step_of_srun_is_joined(tmp_path: Path) -> None:
    """Each task is a worker, without an engine of ours; on one node, for the nodes' names mean nothing to this host."""
    out = tmp_path / "run"
    command = ["srun", "--nodes=1", "--ntasks=2", *train("--epochs=2", f"--out={out}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "polytempo: Slurm, 2 ranks" in done.stderr
    assert result(out)["parameters_sha256"] == hash_here("sync_sgd()")


def test_keys_are_on_no_command_line(tmp_path: Path, mark: str) -> None:
    with begun([*train("--epochs=10000"), "--engine=slurm:nodes=2"], tmp_path / "run") as process:
        for each in processes(mark):
            words = Path(f"/proc/{each}/cmdline").read_bytes()
            assert b"polytempo-ticket" not in words
            assert b"POLYTEMPO_TICKET={" not in Path(f"/proc/{each}/environ").read_bytes()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LONG_S)


def submitted(folder: Path, *options: str) -> str:
    """The number of a job that trains in `folder`/run."""
    command = [sys.executable, "-m", "polytempo", "submit", *train(*options)[3:], "--engine=slurm:nodes=2"]
    done = subprocess.run(
        [*command, f"--out={folder / 'run'}"], cwd=folder, capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[2].rstrip(";")


def facts(job: str) -> dict[str, str]:
    """Slurm's facts about a job."""
    line = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=True)
    return dict(word.partition("=")[::2] for word in line.stdout.split() if "=" in word)


def state(job: str) -> str:
    """Slurm's word for the state of a job."""
    return facts(job)["JobState"]


def completed(job: str) -> bool:
    """True if a job has ended well.

    Slurm lets a requeued job wait for two minutes. A few seconds will do, but not none: a node fails a job that begins
    again in the second of its end.
    """
    found = facts(job)
    now, waits_until = found["JobState"], found.get("EligibleTime", "")
    soon = (datetime.now() + timedelta(seconds=_SOON_S)).isoformat()
    if now == "PENDING" and waits_until > soon:  # it may be set again while the first run is being cleared away
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+3"], check=False)
    assert now in {"PENDING", "RUNNING", "COMPLETING", "COMPLETED"}, now
    return now == "COMPLETED"


def test_a_job_whose_time_is_over_goes_on_to_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """Slurm's signal before the end of the time is sent by hand; the job goes back into the queue and resumes."""
    job = submitted(tmp_path, "--epochs=20", "--checkpoint-every=20")
    awaited(lambda: rows(tmp_path / "run") >= 3, "the run's begin")
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    awaited(lambda: state(job) == "PENDING", "the job in the queue again")
    awaited(lambda: completed(job), "the job's end")
    log = (tmp_path / f"digits-{job}.log").read_text()
    assert (tmp_path / "run" / "result.json").exists(), log
    calm = digits("sync_sgd()", pt.engines.slurm(nodes=2), epochs=20)
    assert result(tmp_path / "run")["parameters_sha256"] == calm.parameters_sha256


def test_a_job_that_is_cancelled_does_not_go_back_into_the_queue(tmp_path: Path) -> None:
    job = submitted(tmp_path, "--epochs=10000")
    awaited(lambda: rows(tmp_path / "run") >= 2, "the run's begin")
    subprocess.run(["scancel", job], check=True)
    awaited(lambda: state(job) == "CANCELLED", "the job's end")


def test_a_job_ends_with_the_runs_exit_code(tmp_path: Path) -> None:
    """2: there is no such data."""
    job = submitted(tmp_path, "--epochs=2", f"--data={shlex.quote(str(tmp_path))}")
    awaited(lambda: state(job) == "FAILED", "the job's end")
    line = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=True)
    assert "ExitCode=2:0" in line.stdout, (tmp_path / f"digits-{job}.log").read_text()


def test_the_nodes_of_a_heterogeneous_job_are_all_used() -> None:
    """Two components: n1 with two cores, n2 with one."""
    with granted(["--nodelist=n1", "--ntasks=1", ":", "--nodelist=n2", "--ntasks=1"], LONG_S) as allocation:
        assert (allocation.nodes, allocation.num_components) == (("n1", "n2"), 2)
        found = digits("sync_sgd()", pt.engines.slurm(job=allocation.job))
    assert found.parameters_sha256 == hash_here("sync_sgd()")
