"""An allocation of Slurm: an existing one, or a new one that this process holds as long as it lives."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, NamedTuple

from polytempo.core.errors import PolytempoError
from polytempo.engines.processes.fork import held_signals, open_program

_ASK_S = 30.0
_END_S = 5.0
_SOON_S = 2.0
_HOLD = 'echo "$SLURM_JOB_ID" && exec cat'
"""The command of salloc: it reports the allocation, and ends when its standard input does. So Slurm takes the
allocation back when this process ends, however that happens."""


class Allocation(NamedTuple):
    """Nodes that a job of Slurm has."""

    job: str
    nodes: tuple[str, ...]
    addresses: tuple[str, ...]
    """The nodes', as Slurm itself reaches them."""
    num_components: int = 1
    """More than one: a heterogeneous job, with components that have nodes of different kinds."""


def existing(job: str) -> Allocation:
    """The allocation of `job`. ValueError where it does not run, or Slurm cannot be asked."""
    lines = asked("scontrol", "--oneliner", "show", "job", job).splitlines()
    states, lists = ([found for line in lines if (found := _field(line, name))] for name in ("JobState", "NodeList"))
    if not lines or set(states) != {"RUNNING"} or len(lists) != len(lines):
        raise ValueError(f"job {job} of Slurm is {' '.join(states) or 'not known'}; it must be running to be joined")
    nodes = [node for each in lists for node in asked("scontrol", "show", "hostnames", each).split()]
    known = asked("scontrol", "--oneliner", "show", "node", ",".join(nodes)).splitlines()
    addresses = {_field(line, "NodeName"): _field(line, "NodeAddr") for line in known}
    return Allocation(job, tuple(nodes), tuple(addresses.get(node) or node for node in nodes), len(lines))


@contextmanager
def granted(options: Sequence[str], queue_s: float) -> Iterator[Allocation]:
    """An allocation for salloc's `options`; it is given back at the end. PolytempoError where none comes in time."""
    errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    with held_signals():  # a started process is known here, too
        try:
            holder = open_program(
                ["salloc", *options, "sh", "-c", _HOLD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            errors.close()
            raise _not_here("salloc", error) from error
    assert holder.stdin is not None
    assert holder.stdout is not None
    patience_s = 0.0
    try:
        job = _job_of(holder, errors, queue_s)
        patience_s = _END_S
        yield existing(job)
    finally:
        with suppress(BrokenPipeError):
            holder.stdin.close()
        for end in (holder.terminate, holder.kill):
            with suppress(subprocess.TimeoutExpired):
                holder.wait(patience_s)
            patience_s = _END_S
            if holder.returncode is None:
                end()
        holder.wait()
        holder.stdout.close()
        errors.close()


def _job_of(holder: subprocess.Popen[bytes], errors: IO[bytes], queue_s: float) -> str:
    """The number of the job that the holder has got."""
    assert holder.stdout is not None
    until_s, noted = time.monotonic() + queue_s, False
    while not select.select([holder.stdout], [], [], min(_SOON_S, max(0.0, until_s - time.monotonic())))[0]:
        if time.monotonic() >= until_s:
            raise PolytempoError(
                f"Slurm has not granted an allocation within {queue_s:g} s ({_said(errors)}); wait longer with "
                "queue_s=, ask for less, or submit the run by `polytempo submit`"
            )
        if not noted:
            noted = True
            print(f"note: waiting for Slurm ({_said(errors)})", file=sys.stderr)
    line = holder.stdout.readline().decode().strip()
    if not line:
        raise PolytempoError(f"Slurm granted no allocation: {_said(errors)}")
    return line


def asked(*words: str, given: str = "") -> str:
    """The output of a command of Slurm that reads `given`. ValueError, with the command's message, if it fails."""
    try:
        done = subprocess.run(  # noqa: S603 - a command of Slurm
            words, input=given, capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except OSError as error:
        raise _not_here(words[0], error) from error
    except subprocess.TimeoutExpired:
        raise ValueError(f"Slurm does not answer: `{' '.join(words)}` took more than {_ASK_S:g} s") from None
    if done.returncode:
        raise ValueError(f"`{' '.join(words)}` failed: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout


def _not_here(command: str, error: OSError) -> ValueError:
    return ValueError(
        f"cannot run {command} ({error.strerror}); the slurm engine needs Slurm's commands (Debian: slurm-client) "
        "on a host that can submit jobs"
    )


def _said(errors: IO[bytes]) -> str:
    errors.seek(0)
    return " ".join(errors.read(4000).decode(errors="replace").split()) or "salloc said nothing"


def _field(line: str, name: str) -> str | None:
    found = re.search(rf"(?:^|\s){name}=(\S+)", line)
    return None if found is None or found[1] == "(null)" else found[1]


def job_here() -> str | None:
    """The job with the allocation in which this process runs."""
    return os.environ.get("SLURM_JOB_ID")
