"""Runs on an emulated cluster, with processes of this host as pods: the same results, and nothing left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from engines.batch_runs import LONG_S, awaited
from engines.emulated_cluster import Cluster, emulated_cluster
from polytempo.core.errors import PolytempoError
from polytempo.engines.processes.failures import WorkerDied
from polytempo.engines.remote.network import address_to
from polytempo.engines.remote.ticket import AgentTicket

DIGITS = pt.jobs.find("digits")
STEPS = 12
KINDS = ("Job", "JobSet", "TrainJob", "TrainingRuntime", "Secret", "Pod")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that the kubeconfig names. Afterwards, no object and no process of a pod may be there."""
    with emulated_cluster() as found:
        monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "config")))
        yield found
        awaited(lambda: left(found) == {kind: [] for kind in KINDS}, "the end of all objects")
        assert found.pods == {}


def left(cluster: Cluster) -> dict[str, list[str]]:
    return {kind: [each["metadata"]["name"] for each in cluster.objects(kind)] for kind in KINDS}


def here() -> str:
    """An address of this host that is not its loopback."""
    return address_to("192.0.2.1")


def engine(**more: Any) -> Any:
    return pt.engines.kubernetes(**{"image": "polytempo", "address": here(), "wait_s": LONG_S, "grace_s": 10} | more)


STRATEGIES = {
    "sync_sgd": pt.strategies.sync_sgd,
    "local_sgd": lambda: pt.strategies.local_sgd(period=4),
    "downpour": lambda: pt.strategies.downpour(shards=2, replicas=1),
}


@cache
def by_local(name: str) -> pt.Result:
    return pt.run(DIGITS, STRATEGIES[name](), workers=2, steps=STEPS, threads=1)


# --- the same run


@pytest.mark.parametrize(
    ("name", "form"), [("sync_sgd", "job"), ("local_sgd", "job"), ("sync_sgd", "jobset"), ("local_sgd", "trainer")]
)
def test_the_parameters_are_the_local_engines(name: str, form: str, cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = pt.run(DIGITS, STRATEGIES[name](), workers=2, steps=STEPS, threads=1, engine=engine(form=form), out=out)
    assert found.parameters_sha256 == by_local(name).parameters_sha256
    assert found.samples == by_local(name).samples
    assert sorted(path.name for path in (out / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert len(cluster.commands) == 2


def test_a_parameter_server_has_its_shards_in_pods(cluster: Cluster) -> None:
    found = pt.run(DIGITS, STRATEGIES["downpour"](), workers=2, epochs=3, threads=1, engine=engine(pods=3))
    assert found.accuracy is not None
    assert found.accuracy > 0.8
    assert found.ledger is not None
    assert all(each["twice"] == each["never"] == 0 for each in found.ledger), found.ledger
    assert len(cluster.commands) == 3


# --- failures


FAILS = """
import os
from dataclasses import replace
from polytempo.jobs.digits import job as digits

def read(given):
    if "JOB_COMPLETION_INDEX" not in os.environ:
        return digits.data(given)
    print("this is in the log", flush=True)
    raise OSError("no such data")

job = replace(digits, name="fails", data=read)
"""
WAITS = """
import os
import threading
from dataclasses import replace
from polytempo.jobs.digits import job as digits

def read(given):
    if "JOB_COMPLETION_INDEX" in os.environ:
        threading.Event().wait()
    return digits.data(given)

job = replace(digits, name="waits", data=read)
"""


def test_an_error_comes_back_with_its_log(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILS)
    job = pt.jobs.find(f"{tmp_path}/own.py:job")
    with pytest.raises(WorkerDied, match="no such data") as raised:
        pt.run(job, pt.strategies.sync_sgd(), workers=2, steps=2, engine=engine())
    assert "this is in the log" in str(raised.value)
    assert any("this is in the log" in path.read_text() for path in cluster.logs.values()), "kubectl logs shows it, too"


def test_a_killed_pod_is_replaced_and_the_run_goes_on(cluster: Cluster) -> None:
    found: list[pt.Result] = []
    run = threading.Thread(
        target=lambda: found.append(
            pt.run(DIGITS, STRATEGIES["downpour"](), workers=2, epochs=60, threads=1, engine=engine(pods=3))
        )
    )
    run.start()
    awaited(lambda: len(processes_of(cluster)) >= 3 + 2 + 2, "the run's begin")
    victim = next(pod for pod in list(cluster.pods.values()) if pod.index == 0)
    assert victim.process is not None
    os.killpg(victim.process.pid, signal.SIGKILL)
    run.join(LONG_S * 2)
    assert not run.is_alive()
    assert found
    assert found[0].ledger is not None
    assert all(each["twice"] == each["never"] == 0 for each in found[0].ledger), found[0].ledger
    assert len(cluster.commands) == 4


def processes_of(cluster: Cluster) -> list[int]:
    """The pods' processes and their children."""
    sessions = {pod.process.pid for pod in list(cluster.pods.values()) if pod.process is not None}
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in found.splitlines()]
    for _ in range(3):
        sessions |= {pid for pid, parent in pairs if parent in sessions}
    return sorted(sessions)


REFUSED = [
    ("job", ("POST", "/secrets"), 403, "cannot create Secret .* HTTP 403.* give the launcher an account"),
    ("job", ("POST", "/jobs"), 403, "cannot create Job"),
    ("jobset", ("POST", "/jobsets"), 404, "cannot create JobSet .*form='job' needs nothing beyond Kubernetes"),
    ("trainer", ("PATCH", "/trainingruntimes/"), 500, "cannot patch TrainingRuntime"),
]


@pytest.mark.parametrize(("form", "request_", "status", "message"), REFUSED, ids=[each[3] for each in REFUSED])
def test_what_the_api_refuses_is_named(
    form: str, request_: tuple[str, str], status: int, message: str, cluster: Cluster
) -> None:
    cluster.refuses[request_] = status
    with pytest.raises(PolytempoError, match=message):
        pt.run(DIGITS, pt.strategies.sync_sgd(), workers=2, steps=2, engine=engine(form=form))


def test_pods_that_cannot_start_are_described(cluster: Cluster) -> None:
    with pytest.raises(PolytempoError, match=r"0 of 2 agents have joined the run: .*has failed 1 times"):
        pt.run(DIGITS, pt.strategies.sync_sgd(), workers=2, steps=2, engine=engine(python="false", restarts=0))


def test_an_api_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_cluster(kubelet=False) as found:
        monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "config")))
    with pytest.raises(PolytempoError, match=r"cannot create Job .* no answer"):
        pt.run(DIGITS, pt.strategies.sync_sgd(), workers=2, steps=2, engine=engine())


# --- the launcher's end


@contextmanager
def launched(tmp_path: Path, cluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    """`polytempo train` of a job that waits for ever, when its two workers wait."""
    (tmp_path / "own.py").write_text(WAITS)
    (tmp_path / "pods.toml").write_text(f'image = "polytempo"\naddress = "{here()}"\nwait_s = {LONG_S}\ngrace_s = 10\n')
    words = ["train", f"{tmp_path}/own.py:job", "--workers", "2", "--out", str(tmp_path / "run")]
    started = subprocess.Popen(
        [sys.executable, "-m", "polytempo", *words, "--engine", f"kubernetes:{tmp_path / 'pods.toml'}"],
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )
    try:
        awaited(lambda: len(processes_of(cluster)) >= 4 or started.poll() is not None, "the run's begin")
        assert started.poll() is None
        yield started
    finally:
        started.kill()
        started.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launcher_leaves_nothing(number: signal.Signals, cluster: Cluster, tmp_path: Path) -> None:
    with launched(tmp_path, cluster) as launcher:
        launcher.send_signal(number)
        assert launcher.wait(LONG_S) != 0
    awaited(lambda: left(cluster) == {kind: [] for kind in KINDS}, "the end of all objects")


def test_a_killed_launcher_leaves_a_job_that_ends(cluster: Cluster, tmp_path: Path) -> None:
    """Agents end alone; Kubernetes removes the Job after `ttl_s`, and with it the Secret."""
    with launched(tmp_path, cluster) as launcher:
        launcher.kill()
    awaited(lambda: not cluster.pods, "the end of all agents")
    (job,) = cluster.objects("Job")
    assert job["spec"]["ttlSecondsAfterFinished"] == 300
    cluster.api().delete("Job", job["metadata"]["name"])
    awaited(lambda: not cluster.objects("Secret"), "the end of the Secret with its owner")


# --- secrets


def test_keys_are_in_files_of_mode_0400_and_nowhere_else(cluster: Cluster, tmp_path: Path) -> None:
    with launched(tmp_path, cluster) as launcher:
        tickets = list(cluster.folder.glob("*/given-0/0.json"))
        assert tickets
        assert {stat.S_IMODE(path.stat().st_mode) for path in tickets} == {0o400}
        keys = [key for key in AgentTicket.read(tickets[0]).keys.to_plain().values() if isinstance(key, str)]
        assert len(keys) >= 2
        (job,) = cluster.objects("Job")
        seen = [str(job), *(str(pod) for pod in cluster.objects("Pod"))]
        for pid in processes_of(cluster):
            seen += [Path(f"/proc/{pid}/{file}").read_text(errors="replace") for file in ("cmdline", "environ")]
        assert not [key for key in keys for text in seen if key in text]
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(LONG_S)
