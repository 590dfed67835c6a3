"""The slurm engine: an agent on each node of an allocation, started by `srun`.

    pt.run(job, strategy, workers=8, engine=pt.engines.slurm(nodes=2, partition="gpu", time="01:00:00"))

Inside an allocation (a batch script, a shell of `salloc`) it takes that one; elsewhere it asks for one, waits in the
queue, and gives it back after the run. `slurm_script` writes a batch script for runs
that shall wait without you.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from polytempo.engines.engine import Launch
from polytempo.engines.on_slurm.allocation import Allocation, asked, existing, granted, job_here
from polytempo.engines.remote.command_agents import AGENT_WORDS, LaunchedAgents, in_shell
from polytempo.engines.remote.network import common_address
from polytempo.engines.remote.remote_engine import RemoteEngine, opened_remote

_TIME = re.compile(r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2}")


@dataclass(frozen=True)
class Slurm:
    """Nodes of Slurm. Without any option: all nodes of this process's allocation, or a new one of 1 node.

    `job` joins the allocation of another job of yours. `nodes`, `partition`, `time` (as Slurm writes it: minutes,
    hours:minutes:seconds, days-hours), `gpus_per_node` and `options`, more words for salloc, ask for a new one; in an
    allocation that exists `nodes` says how many of its nodes are used, and the others have no effect. `queue_s` is how
    long a new one is waited for, `wait_s` how long its agents. `address` is where nodes reach this host; None: as the
    system routes. The run's keys travel on srun's standard input, or, in a heterogeneous job, in the environment that
    srun passes on. Errors: ValueError for options that cannot be, or a job that does not run; PolytempoError where no
    allocation, or not all agents, come in time.
    """

    nodes: int | None = None
    partition: str | None = None
    time: str | None = None
    gpus_per_node: int | None = None
    job: str | None = None
    options: Sequence[str] = ()
    python: str = sys.executable
    address: str | None = None
    queue_s: float = 3600.0
    wait_s: float = 120.0

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 1:
            raise ValueError(f"nodes={self.nodes} must be at least 1")
        if self.gpus_per_node is not None and self.gpus_per_node < 0:
            raise ValueError(f"gpus_per_node={self.gpus_per_node} must not be negative")
        if self.time is not None and not _TIME.fullmatch(str(self.time)):
            raise ValueError(
                f"time={self.time!r} must be as Slurm writes it: 30 (minutes), 01:30:00, or 1-12 (days-hours)"
            )
        if isinstance(self.options, str):
            raise ValueError(f'options={self.options!r} must be a list of words, such as ["--account=physics"]')

    @classmethod
    def from_address(cls, address: str) -> Slurm:
        """The engine of the command line's `slurm`, or `slurm:nodes=2,partition=gpu,time=30`."""
        given: dict[str, Any] = {}
        kinds = {"nodes": int, "gpus_per_node": int, "partition": str, "time": str, "job": str}
        for part in filter(None, address.split(",")):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in kinds or not value:
                raise ValueError(f"--engine slurm:{address}: {part!r} is not one of NAME=VALUE with {', '.join(kinds)}")
            if kinds[name] is int and not value.isdecimal():
                raise ValueError(f"--engine slurm:{address}: {name} must be a whole number, got {value!r}")
            given[name] = kinds[name](value)
        return cls(**given)

    @contextmanager
    def open(self, launch: Launch) -> Iterator[RemoteEngine]:
        """See `EngineSetup`."""
        job = self.job or job_here()
        with nullcontext(existing(job)) if job else granted(self.asking(), self.queue_s) as allocation:
            allocation = self._chosen(allocation)
            address = self.address or common_address(allocation.addresses)
            where = [f"node {node}" for node in allocation.nodes]
            # One component's tasks alone read srun's standard input, with any value of --input.
            starter = LaunchedAgents(self.step(allocation), where, by_variable=allocation.num_components > 1)
            with opened_remote(launch, starter, len(where), address=address, wait_s=self.wait_s) as engine:
                yield engine

    def asking(self) -> list[str]:
        """The options that ask for an allocation."""
        named = {
            "nodes": self.nodes or 1,
            "ntasks-per-node": 1,
            "partition": self.partition,
            "time": self.time,
            "gpus-per-node": self.gpus_per_node,
        }
        return [f"--{name}={value}" for name, value in named.items() if value is not None] + list(self.options)

    def step(self, allocation: Allocation) -> list[str]:
        """The command that starts an agent on each of the allocation's nodes."""
        count = len(allocation.nodes)
        if allocation.num_components == 1:
            size = [f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(allocation.nodes)}"]
        else:
            size = [f"--het-group=0-{allocation.num_components - 1}"]
        return [
            "srun",
            f"--jobid={allocation.job}",
            *size,
            "--ntasks-per-node=1",
            "--overlap",  # in addition to the step of this process's shell
            "--cpu-bind=none",  # an agent's processes use all of the allocation's cores
            "--input=all",
            "--kill-on-bad-exit=0",
            "--no-kill",
            *in_shell([self.python, *AGENT_WORDS]),
        ]

    def _chosen(self, allocation: Allocation) -> Allocation:
        """The nodes of the allocation that are used."""
        if self.nodes is None or self.nodes == len(allocation.nodes):
            return allocation
        if self.nodes > len(allocation.nodes) or allocation.num_components > 1:
            raise ValueError(
                f"nodes={self.nodes}, and job {allocation.job} has {len(allocation.nodes)} "
                f"({', '.join(allocation.nodes)}); leave nodes out to use them all"
            )
        return allocation._replace(nodes=allocation.nodes[: self.nodes], addresses=allocation.addresses[: self.nodes])


_SCRIPT = """\
#!/bin/bash
{directives}

# {grace_s} s before the time is over, Slurm sends SIGUSR1: the run gets SIGTERM, saves and leaves, and the job goes
# back into the queue. It does not where the run ended well, failed by itself, or was cancelled by scancel (SIGTERM).

run=({run})
{resume} && run+=(--resume)

again= heard=
trap 'again=yes heard=yes; kill -TERM "$child"' USR1
trap 'heard=yes; kill -TERM "$child"' TERM

"${{run[@]}}" &
child=$!
while :; do
  wait "$child"
  code=$?
  [ "$heard" ] || break # else a signal has ended the wait, and perhaps not the run
  heard=
done

if [ "$again" ] && [ "$code" -ne 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def slurm_script(setup: Slurm, command: Sequence[str], out: str, *, name: str = "polytempo", grace_s: int = 60) -> str:
    """The text of a script for sbatch that runs `command`, which trains on all of the job's nodes and keeps its run in
    `out`.

        run = ["polytempo", "train", "digits", "--engine", "slurm", "--out", "runs/digits"]
        print(slurm_script(pt.engines.slurm(nodes=2, time="30"), run, "runs/digits"))

    Where the job starts again, because its time was over, a node failed or it was preempted, and `out` holds a
    checkpoint, `--resume` is added. The exit code is the command's. The output goes to `NAME-JOB.log`. Errors:
    ValueError for a `job`, which exists already, and for less than a second of grace.
    """
    if setup.job is not None:
        raise ValueError(f"job={setup.job!r} exists already; leave job out to submit a new one")
    if grace_s < 1:
        raise ValueError(f"grace_s={grace_s} must be at least 1 second, for the run to save")
    kept = [
        f"--job-name={name}",
        f"--output={name}-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{grace_s}",
    ]
    # A file system of objects has no folder to look at; the number of starts tells as much.
    is_url = "://" in out
    resume = '[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]' if is_url else f"[ -d {shlex.quote(out + '/checkpoint')} ]"
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {shlex.quote(option)}" for option in [*setup.asking(), *kept]),
        grace_s=grace_s,
        run=shlex.join(command),
        resume=resume,
    )


def submit(script: str) -> str:
    """Hand a script to sbatch; the job's number. ValueError, with sbatch's message, if it refuses."""
    return asked("sbatch", "--parsable", given=script).strip().partition(";")[0]
