"""The tables of `polytempo cut`, `calibrate`, `profile` and `validate`, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from polytempo.cli.options import values
from polytempo.cli.options.completion import CUT_GOALS, cluster_names, cut_goals, engine_names, job_names
from polytempo.cli.options.shared_options import (
    ARGUMENT,
    OPTIONS,
    BatchSize,
    Data,
    Device,
    Job,
    Json,
    Strategy,
    Ui,
    Workers,
    check_shown,
    new_folder,
)
from polytempo.spec.table.option import Count, Option, Positive


def _cut_by(text: str) -> str | tuple[str, ...]:
    """A goal, or names of layers."""
    goal = text.strip()
    found = tuple(each.strip() for each in goal.split(","))
    if not all(found):
        raise ValueError("a name is empty; write names of layers with commas between")
    if goal in CUT_GOALS:
        return goal
    if close := get_close_matches(goal, CUT_GOALS, n=1, cutoff=0.75):
        raise ValueError(f"did you mean {close[0]}? There are: {', '.join(CUT_GOALS)}, or names of layers")
    return found


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """Options of `polytempo cut`."""

    job: Job
    stages: Annotated[Count | None, Option(OPTIONS, "K")] = None
    """Number of stages. Default: 2, or by the names in --by."""
    by: Annotated[str | tuple[str, ...], Option(OPTIONS, "GOAL", read=_cut_by, complete=cut_goals)] = CUT_GOALS[0]
    """Make this the least: operations or memory of the largest stage, its measured time, or traffic; or names of layers
    that begin stages, with commas. Default: operations."""
    batch_size: Annotated[Count | None, Option(OPTIONS, "B")] = None
    """Samples of a micro-batch. Default: the job's batch."""
    activations: Annotated[str | None, Option(OPTIONS, "CODEC", read=values.codec)] = None
    """Codec of tensors between stages, such as int8."""
    gradients: Annotated[str | None, Option(OPTIONS, "CODEC", read=values.codec)] = None
    """Codec of their gradients, such as bf16."""
    gbit_per_s: Annotated[Positive | None, Option(OPTIONS, "G")] = None
    """Rate of the links between stages. Default: messages take no time."""
    data: Data = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of `polytempo calibrate`."""

    engine: Annotated[str, Option(OPTIONS, "E", complete=engine_names)] = "local"
    """Measure the hosts of this engine. Default: local, this one."""
    workers: Annotated[Annotated[int, Meta(ge=1, le=64)] | None, Option(OPTIONS, "N")] = None
    """Processes that measure together, as many a host as it will have workers. Default: one a host, or 2."""
    out: Annotated[Path, Option(OPTIONS, "FILE")] = Path("cluster.toml")
    """File for the cluster. Default: cluster.toml."""
    job: Annotated[str | None, Option(OPTIONS, "JOB", read=values.job, complete=job_names)] = None
    """Measure this job's own steps, too: digits, …, my_module:job or path/to/file.py:job."""
    device: Device = "auto"
    batch_size: BatchSize = None
    data: Data = None
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse options of a job where there is none."""
        if self.job is None and (self.batch_size is not None or self.data is not None):
            raise ValueError("--batch-size and --data say how a job is measured: give --job, too, or leave them out")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of `polytempo profile`."""

    job: Annotated[str, Option(ARGUMENT, "JOB|RUN", read=values.job_or_run, complete=job_names)]
    """A job, or the folder of a run that was made with --profile."""
    strategy: Strategy = "sync_sgd"
    workers: Workers = 2
    batch_size: BatchSize = None
    cluster: Annotated[str | None, Option(OPTIONS, "FILE", read=values.cluster)] = None
    """A file of `polytempo calibrate`, to predict the times."""
    device: Device = "auto"
    data: Data = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """Options of `polytempo validate`."""

    run: Annotated[Path, Option(ARGUMENT, "RUN")]
    """The folder of a run, such as runs/digits-async_sgd."""
    cluster: Annotated[str, Option(OPTIONS, "C", read=values.cluster, complete=cluster_names)] = "cluster.toml"
    """Simulate the run on this: a file of `polytempo calibrate`. Default: cluster.toml."""
    job: Annotated[str | None, Option(OPTIONS, "JOB", read=values.job, complete=job_names)] = None
    """The run's job, if it does not ship."""
    data: Data = None
    out: Annotated[Path | None, Option(OPTIONS, "DIR", read=new_folder)] = None
    """Keep the simulation in this folder; beside the run, the live page shows the two together."""
    ui: Ui = False
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse a page that would show no simulation."""
        beside = f"{self.folder}-simulated"
        check_shown(self, "out", beside)
        if self.ui and self.out is not None and self.out.resolve().parent != self.folder.parent:
            raise ValueError(f"--ui --out {self.out}: the page shows a simulation beside its run; give --out {beside}")

    @property
    def folder(self) -> Path:
        """The run's folder with its name, which `.` lacks."""
        return self.run.resolve()
