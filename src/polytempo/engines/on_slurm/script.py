"""A batch script for Slurm: a run that waits in the queue by itself, and goes on where its time was over."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from polytempo.engines.on_slurm.allocation import asked
from polytempo.engines.on_slurm.slurm_engine import Slurm

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
    checkpoint, `--resume` is added. The exit code is the command's. What it prints goes to `NAME-JOB.log`. Errors:
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
    """Hand a script to sbatch; the job's number. ValueError with what sbatch says where it refuses."""
    return asked("sbatch", "--parsable", given=script).strip().partition(";")[0]
