"""Deaths: 50 trainings with one injected fault each. How many end with a line that names the first culprit?

    python benchmarks/deaths/main.py                 all rows; a row a line, the table in runs/deaths/tables.md
    python benchmarks/deaths/main.py --only Slurm    rows with this word
    PYTHONPATH=tests python benchmarks/deaths/main.py --real     rows under mpirun and srun of this machine instead

A row passes if the last line of standard error (of a loop's ranks: of every rank with a line)
is "first failure: …" with the culprit's rank, its host, the cause, and a log, and if all processes are gone within the
deadline of waits plus `PATIENCE_S`. Slurm, Open MPI and torchrun with a static store are emulated: processes with their
variables, ended as these launchers do. Rows named "torchrun", "mpirun" and "srun" run the real ones (Debian:
openmpi-bin; slurmctld, slurmd, slurm-client and munge, which are started here).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import faults
import torch._dynamo  # noqa: F401 - once here, not once in each process

import polytempo as pt

OUT = Path("runs/deaths")
FAULTS = Path(faults.__file__)
PATIENCE_S = 12.0
"""Seconds beyond the deadline of waits: agreement, a launcher's own patience, a busy machine."""
_KILL_S = 5.0
_MPIRUN_S = 0.02
"""A launcher's way from a rank's end to its signals to the others, at least."""
_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS
_GROUPS = Path("/sys/fs/cgroup")


class Row(NamedTuple):
    """One training with one fault."""

    launcher: str
    training: str
    fault: str
    culprit: int = 1
    size: int = 3
    expected: str = ""
    """A pattern of the cause, if it is not the fault's usual one."""
    who: str = ""
    """A pattern of the name, if it is not the culprit's rank."""

    def __str__(self) -> str:
        return f"{self.launcher}, {self.training}: {self.fault} on {self.culprit} of {self.size}"


CAUSES = {
    "raise": r"(raised LookupError|failed: ).*no row 17",
    "kill": r"was killed by SIGKILL",
    "crash": r"was killed by SIGSEGV",
    "stop": r"is stopped by a signal",
    "exit": r"exit code 3",
    "hang": r"hangs",
    "memory": r"was killed for memory: its control group, which allows [\d,]+ MiB",
    "host": r"was (lost with (all )?2 ranks of its host|killed by SIGKILL)",
    "NaN": r"raised NotFinite: .*nan",
    "shape": r"(raised|failed).*(shape|scalar|lengths)",
}

LOOPS = [
    *(Row("torchrun", "replicas", each) for each in ("raise", "kill", "hang", "exit")),
    Row("torchrun", "stages", "kill", culprit=2),
    Row("torchrun", "joined", "raise", culprit=0),
    Row("torchrun", "replicas", "kill", culprit=0),
    *(Row("static torchrun", "replicas", each) for each in ("raise", "kill", "crash", "stop", "memory", "shape")),
    *(Row("static torchrun", "replicas", each, culprit=0) for each in ("raise", "kill", "hang")),
    Row("static torchrun", "averaged", "hang", culprit=2),
    Row("static torchrun", "strict", "NaN"),
    Row("static torchrun", "layers", "raise"),
    Row("static torchrun", "layers", "kill", culprit=2),
    Row("static torchrun", "stages", "hang"),
    Row("static torchrun", "stages", "shape", culprit=0),
    Row("static torchrun", "joined", "kill"),
    Row("static torchrun", "joined", "NaN"),
    *(Row("Slurm", "replicas", each) for each in ("raise", "kill", "hang", "exit", "memory")),
    Row("Slurm", "stages", "raise", culprit=2),
    Row("Slurm", "replicas", "kill", culprit=0),
    *(Row("Slurm on two hosts", "replicas", each, culprit=3, size=4) for each in ("raise", "kill", "host", "hang")),
    Row("Slurm on two hosts", "replicas", "kill", culprit=0, size=4, expected="killed by SIGKILL|ended without a word"),
    *(Row("Open MPI", "replicas", each) for each in ("raise", "kill", "hang")),
]
JOBS = [
    *(Row("pt.run", "sync_sgd()", each, size=2) for each in ("raise", "kill", "hang", "NaN", "memory", "shape")),
    Row("pt.run", "one_f_one_b(stages=2, micro_batches=2)", "kill", size=2),
    Row("pt.run", "downpour(shards=1)", "raise", size=2, who="worker-1"),
    Row("pt.run elastic", "sync_sgd()", "raise", size=2),
    Row("subprocess", "sync_sgd()", "kill", size=2),
    Row("subprocess", "sync_sgd()", "stop", size=2),
    Row("ssh", "sync_sgd()", "raise", size=2),
    Row("ssh", "sync_sgd()", "kill", size=2),
]
REAL = [
    *(
        Row("mpirun", "replicas", each)
        for each in ("raise", "kill", "crash", "stop", "hang", "exit", "memory", "shape")
    ),
    *(Row("srun", "replicas", each) for each in ("raise", "kill", "crash", "stop", "hang", "exit", "shape")),
    *(Row(each, "replicas", "kill", culprit=0) for each in ("mpirun", "srun")),
    *(Row(each, "strict", "NaN") for each in ("mpirun", "srun")),
    *(Row(each, "layers", "kill", culprit=2) for each in ("mpirun", "srun")),
    *(Row(each, "stages", "raise", culprit=2) for each in ("mpirun", "srun")),
    *(Row(each, "joined", "kill") for each in ("mpirun", "srun")),
]
ROWS = [*LOOPS, *JOBS]


class Ended(NamedTuple):
    """The end of a row."""

    passed: bool
    seconds: float
    """Seconds from the fault to the end of the last process."""
    line: str
    problem: str = ""


def main() -> None:
    """Run the rows, print each, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="rows with one of these words")
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, help="seconds beyond the deadline of waits")
    parser.add_argument("--real", action="store_true", help="rows under mpirun and srun of this machine instead")
    asked = parser.parse_args()
    rows = [row for row in (REAL if asked.real else ROWS) if any(word in str(row) for word in asked.only)]
    table, passed = [], 0
    with slurm_for(rows):
        for row in rows:
            end = ended(row, asked.patience_s)
            passed += end.passed
            word = "named" if end.passed else "MISSED"
            print(f"{word}  {end.seconds:5.1f} s  {row}: {end.line} {end.problem}", flush=True)
            table.append([row.launcher, row.training, f"{row.fault} on {row.culprit}", f"{end.seconds:.1f}", end.line])
    OUT.mkdir(parents=True, exist_ok=True)
    head = ["launcher", "training", "fault on rank", "seconds", "line"]
    lines = [" | ".join(cells) for cells in [head, ["---"] * len(head), *table]]
    (OUT / "tables.md").write_text("".join(f"| {line} |\n" for line in lines))
    print(f"{passed} of {len(rows)} end with the culprit's name")
    sys.exit(passed < 0.96 * len(rows))


@contextmanager
def slurm_for(rows: list[Row]) -> Iterator[None]:
    """A Slurm cluster on this host for rows under srun."""
    if not any(row.launcher == "srun" for row in rows):
        yield
        return
    from engines.slurm_cluster import slurm_cluster

    with tempfile.TemporaryDirectory(prefix="deaths-slurm-") as folder, slurm_cluster(Path(folder)) as variables:
        os.environ.update(variables)
        yield


def ended(row: Row, patience_s: float) -> Ended:
    """Run one row."""
    folder = Path(tempfile.mkdtemp(prefix="deaths-"))
    group = memory_group(folder.name) if row.fault == "memory" else None
    before = {"FAULT": row.fault, "CULPRIT": str(row.culprit), "FOLDER": str(folder)}
    os.environ.update(before)
    try:
        said = job(row, folder, group) if row in JOBS else loops(row, folder, group)
        struck = folder / "struck"
        seconds = time.monotonic() - float(struck.read_text()) if struck.exists() else float("nan")
        return judged(row, said, seconds, patience_s)
    finally:
        if "KEEP" in os.environ:
            shutil.copytree(folder, OUT / re.sub(r"\W+", "-", str(row)), dirs_exist_ok=True)
        for name in before:
            del os.environ[name]
        shutil.rmtree(folder, ignore_errors=True)
        if group is not None:
            leave(group)


def judged(row: Row, said: list[str], seconds: float, patience_s: float) -> Ended:
    """Look at the last line of each process's standard error."""
    lines = [text.strip().splitlines()[-1] for text in said if text.strip()]
    spoken = [line for line in lines if "first failure: " in line]
    line = spoken[0].partition("first failure: ")[2] if spoken else ""
    who = row.who or rf"rank {row.culprit} of {row.size}"
    if row.fault == "host":
        who = rf"rank [23] of {row.size}"
    host = "n2" if "two hosts" in row.launcher and row.culprit > 1 else "n1" if "two" in row.launcher else r"\S+"
    cause = row.expected or CAUSES[row.fault]
    found = re.match(rf"{who} on {host} .*({cause}).*; read ", line)
    problem = "" if found else f"[{who} on {host} ... {cause} is not in the last lines: {lines}]"
    if not seconds < faults.TIMEOUT_S + patience_s:
        problem += f" [it took {seconds:.1f} s]"
    return Ended(not problem, seconds, line, problem)


# ------------------------------------------------------------------ loops of one's own


def loops(row: Row, folder: Path, group: Path | None) -> list[str]:
    """The standard errors of a world's ranks."""
    logs, size = folder / "logs", str(row.size)
    launchers = {
        "torchrun": f"-m torch.distributed.run --standalone --nproc-per-node {size} --redirects 3 --log-dir {logs}",
        "mpirun": f"mpirun.openmpi --allow-run-as-root --oversubscribe -n {size} --output-filename {logs}",
        "srun": f"srun --nodes=1 --overcommit --ntasks={size} --error={logs}/stderr-%t",
    }
    if row.launcher in launchers:
        logs.mkdir()
        joining = [] if group is None else ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        words = launchers[row.launcher].split()
        words = [sys.executable, *words] if row.launcher == "torchrun" else [*words, sys.executable]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([*joining, *words, str(FAULTS), row.training], capture_output=True, timeout=120, check=False)
        return [path.read_text() for path in sorted(logs.glob("**/stderr*"))]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {}
    for rank in range(row.size):
        ranks[forked(lambda rank=rank: be_rank(row, rank, port, folder, group), folder / f"rank-{rank}.log")] = rank
    await_ranks(row, set(ranks))
    return [(folder / f"rank-{rank}.log").read_text() for rank in range(row.size)]


def be_rank(row: Row, rank: int, port: int, folder: Path, group: Path | None) -> None:
    """Be one rank of a world, as its launcher would have started it."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    size, spread = row.size, "two hosts" in row.launcher
    host = rank * 2 // size if spread else 0
    address = "127.0.0.1"
    if spread:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it asks for this host's address in its network
            address = probe.getsockname()[0]
        if ctypes.CDLL(None).unshare(_NEW_HOST_NAME):
            raise OSError("unshare needs root")
        socket.sethostname(f"n{host + 1}")
        if host == 1 and rank != row.culprit:
            (folder / f"host-{rank}").write_text(str(os.getpid()))
    variables = {
        "static torchrun": {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size},
        "Open MPI": {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": size,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": size,
            "PMIX_NAMESPACE": f"deaths{port}",
        },
    }.get(
        row.launcher,
        {
            "SLURM_JOB_ID": port,
            "SLURM_STEP_ID": 0,
            "SLURM_PROCID": rank,
            "SLURM_NTASKS": size,
            "SLURM_STEP_NUM_TASKS": size,
            "SLURM_STEP_NUM_NODES": 1 + spread,
            "SLURM_NODEID": host,
            "SLURM_LOCALID": rank % 2 if spread else rank,
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)" if spread else str(size),
        },
    )
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    faults.LOOPS[row.training]()


def await_ranks(row: Row, running: set[int]) -> None:
    """Wait for all ranks. torchrun and mpirun end the others after a failure; Slurm does so only if asked to."""
    until_s, asked = time.monotonic() + 90.0, False
    ends = row.launcher != "Slurm" and "two hosts" not in row.launcher
    while running and time.monotonic() < until_s:
        failed = False
        for pid in list(running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                running.discard(pid)
                failed = True
        if failed and ends and not asked:
            asked, until_s = True, time.monotonic() + _KILL_S
            time.sleep(_MPIRUN_S)
            for pid in running:
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.0 if row.launcher == "Open MPI" else 0.1)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def forked(work: Callable[[], Any], log: Path) -> int:
    """A process that does `work`, writes to `log`, and ends as an interpreter does."""
    pid = os.fork()
    if pid:
        return pid
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 0
    try:
        work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        import atexit

        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)


# ------------------------------------------------------------------ jobs under our own launcher


def job(row: Row, folder: Path, group: Path | None) -> list[str]:
    """The standard error of the launcher's process."""
    log = folder / "launcher.log"
    pid = forked(lambda: launch(row, folder, group), log)
    until_s = time.monotonic() + 120.0
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.05)
    return [log.read_text()]


def launch(row: Row, folder: Path, group: Path | None) -> None:
    """Run the job."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    own: dict[str, Any] = {"min_workers": 1} if row.launcher.endswith("elastic") else {}
    engine: Any = None
    if row.launcher == "subprocess":
        engine = pt.engines.subprocess()
    if row.launcher == "ssh":
        engine = pt.engines.ssh(["n1", "n2"], sys.executable, ("env", "HOST={host}"), "127.0.0.1")
    found = pt.jobs.find(f"{FAULTS}:job")
    try:
        pt.run(found, row.training, row.size, engine=engine, timeout_s=faults.TIMEOUT_S, out=folder / "run", **own)
    except Exception:
        traceback.print_exc()
    events = folder / "run" / "events.jsonl"
    if not events.exists() or '"about": "death"' not in events.read_text():
        print("no diagnosis in the stream", file=sys.stderr)


# ------------------------------------------------------------------ memory


def memory_group(name: str) -> Path:
    """A control group of its own with 1,500 MiB. OSError where this process may not make one."""
    first = (_GROUPS / "memory").is_dir()
    group = (_GROUPS / "memory" if first else _GROUPS) / name
    group.mkdir()
    (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(1500 << 20))
    return group


def leave(group: Path) -> None:
    """Remove the group."""
    until_s = time.monotonic() + _KILL_S
    while time.monotonic() < until_s:
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.1)


if __name__ == "__main__":
    main()
