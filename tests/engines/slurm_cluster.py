"""A Slurm cluster of two nodes on this host, in a folder of its own: munged, slurmctld and two slurmd (needs root)."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engines.batch_runs import awaited

_UP_S = 60.0
_END_S = 10.0
_CONFIGURATION = """
ClusterName=polytempo
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=2
OverTimeLimit=0
MinJobAge=300
JobRequeue=1
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The cluster; yields the variables that its commands need. Ends every process that it has started."""
    folder.chmod(0o755)  # munged refuses a socket in a folder that others cannot enter
    _write_configuration(folder)
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as running:
        munge = ["/usr/sbin/munged", "--foreground", "--force", "--num-threads=2"]
        files = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munged.pid",
            "seed-file": "munged.seed",
        }
        for option, name in {**files, "log-file": "munged.log"}.items():
            munge.append(f"--{option}={folder / name}")
        running.enter_context(_daemon(munge, folder))
        awaited(lambda: (folder / "munge.socket").exists(), "munged", _UP_S)
        for command in (["slurmctld", "-c", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            running.enter_context(_daemon([f"/usr/sbin/{command[0]}", *command[1:]], folder, variables))
        try:
            awaited(lambda: _idle_nodes(variables) == 2, f"Slurm (its logs are in {folder})", _UP_S)
            yield variables
        finally:
            subprocess.run(["scancel", "--user=root"], env=os.environ | variables, check=False, capture_output=True)
            with suppress(TimeoutError):
                awaited(lambda: not queue(variables), "the end of Slurm's jobs", _UP_S)


def queue(variables: dict[str, str]) -> list[str]:
    """The jobs that have not ended, one line each."""
    asked = ["squeue", "--noheader", "--format=%i %T", "--states=all"]
    lines = subprocess.run(asked, env=os.environ | variables, check=True, capture_output=True, text=True).stdout
    return [line for line in lines.splitlines() if not any(end in line for end in _ENDED)]


_ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE")


def _idle_nodes(variables: dict[str, str]) -> int:
    asked = ["sinfo", "--noheader", "--Node", "--format=%T"]
    seen = subprocess.run(asked, env=os.environ | variables, check=False, capture_output=True, text=True)
    return seen.stdout.split().count("idle")


def _write_configuration(folder: Path) -> None:
    (folder / "state").mkdir()
    with open(os.open(folder / "munge.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as key:
        key.write(secrets.token_bytes(1024))
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        controller, first, second = (each.getsockname()[1] for each in sockets)
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            controller=controller,
            first=first,
            second=second,
        )
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


@contextmanager
def _daemon(command: Sequence[str], folder: Path, variables: dict[str, str] | None = None) -> Iterator[None]:
    name = Path(command[0]).name
    with open(folder / f"{name}.out", "ab") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=os.environ | (variables or {})
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
