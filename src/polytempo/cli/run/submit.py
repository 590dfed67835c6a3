"""`polytempo submit`: hand a `train` command to Slurm, as a job that continues in a new job when its time is over."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polytempo.cli.options.request import RunRequest
from polytempo.engines.on_slurm.slurm_engine import Slurm, slurm_script
from polytempo.engines.on_slurm.slurm_engine import submit as submitted
from polytempo.runs.frame.folder_names import slug

_GRACE_S = 60


def submit(
    command: Sequence[str], request: RunRequest, *, sbatch: str | None, grace_s: int | None, dry_run: bool
) -> None:
    """Submit `command` (request: `request`), or only print its script. ValueError for impossible jobs."""
    name, address = request.engine
    if name != "slurm":
        raise ValueError(
            f"--engine {request.engine}: a job for Slurm needs that engine, and its resources: "
            "polytempo submit train JOB --engine slurm:nodes=2,time=30 --out FOLDER"
        )
    setup, out = replace(Slurm.from_address(address or ""), options=shlex.split(sbatch or "")), str(request.options.out)
    name = slug(Path(request.job).name)
    script = slurm_script(
        setup,
        [setup.python, "-m", "polytempo", *command],
        out,
        name=name,
        grace_s=_GRACE_S if grace_s is None else grace_s,
    )
    if dry_run:
        print(script, end="")
        return
    job = submitted(script)
    print(f"submitted job {job}; it writes to {name}-{job}.log, and its run to {out}")
