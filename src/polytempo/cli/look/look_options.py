"""The tables of commands that look at runs, strategies and machines, checked before torch is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from polytempo.cli.options import values
from polytempo.cli.options.completion import cluster_names, engine_names, job_names, strategy_names
from polytempo.cli.options.shared_options import ARGUMENT, OPTIONS, Data, Device, Json, Threads
from polytempo.spec.table.option import Count, Option, Positive

_STOPS = ("step", "ticket", "version")
_MOST_PER_CORE = 16


def _run_folders(texts: list[str]) -> tuple[str, ...]:
    return tuple(map(values.run_folder, texts))


def _picture_folder(text: str) -> str:
    if "://" not in text and not Path(text).is_dir():
        raise ValueError("there is no such folder; make it, or leave --out out")
    return text


def _recorded(run: Path | str) -> Path:
    if isinstance(run, str):
        raise ValueError("where a URL names a run's folder there is no record, so it cannot be replayed")
    if not run.is_dir():
        raise ValueError("there is no such folder; name the folder of a run")
    return run


def _count(text: str) -> str:
    values.count(text)
    return text


def stop_of(text: str) -> tuple[str, int]:
    """The end of a replay: `step=K`, `ticket=T` or `version=V`."""
    kind, equals, number = (part.strip() for part in text.partition("="))
    if kind not in _STOPS or not equals or not number.isdecimal() or int(number) < (kind != "ticket"):
        raise ValueError("must be written step=K or version=K with K >= 1, or ticket=T with T >= 0, as in step=100")
    return kind, int(number)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `polytempo report`."""

    runs: Annotated[tuple[str, ...], Option(ARGUMENT, "RUN", read=_run_folders)]
    """The folders of runs that have ended, as --out names them."""
    out: Annotated[str, Option(OPTIONS, "FILE")] = "report.html"
    """The page. Default: report.html."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of `polytempo replay`."""

    run: Annotated[Path, Option(ARGUMENT, "RUN", read=_recorded)]
    """The folder of a run, such as runs/digits-async_sgd."""
    until: Annotated[tuple[str, int] | None, Option(OPTIONS, "WHERE", read=stop_of)] = None
    """Stop early and show the last pushes: step=K (all batches of the first K steps are pushed to shard 0), ticket=T
    (batch number T is), or version=V (shard 0 has made V updates)."""
    inspect: Annotated[bool, Option(OPTIONS)] = False
    """Show every push: worker, step, staleness, verdict."""
    shard: Annotated[int, Option(OPTIONS, "N")] = 0
    """Show the pushes of this shard. Default: 0."""
    job: Annotated[str | None, Option(OPTIONS, "JOB", read=values.job)] = None
    """The run's job, if the record does not name it."""
    data: Data = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """Options of `polytempo top`."""

    run: Annotated[str, Option(ARGUMENT, "RUN")]
    """The folder of a run, as --out names it."""
    once: Annotated[bool, Option(OPTIONS)] = False
    """Show the run as it is now, and end."""
    every_s: Annotated[float, Meta(ge=0.1, le=3600), Option(OPTIONS, "T")] = 1.0
    """Seconds between two looks. Default: 1."""
    records: Annotated[bool, Option(OPTIONS)] = False
    """Print the run's records until it ends, each as a line of JSON; with --once the records so far."""
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.records and self.json:
            raise ValueError("--records prints lines of JSON already; leave out --json")


@dataclass(frozen=True, kw_only=True)
class UiOptions:
    """Options of `polytempo ui`."""

    runs: Annotated[str, Option(ARGUMENT, "RUNS", read=values.runs_folder)] = "runs"
    """The folder of runs, or of one run; a URL too. Default: runs."""
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)] | None, Option(OPTIONS, "P")] = None
    """The port of the page; 0 takes any free one. Default: the first free one from 7440 on."""
    host: Annotated[str, Option(OPTIONS, "H", read=values.written)] = "127.0.0.1"
    """The address that the page is served at. Default: 127.0.0.1, which only this machine reaches."""
    open: Annotated[bool, Option(OPTIONS)] = False
    """Open the page in this machine's browser."""


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Options of `polytempo runs`."""

    runs: Annotated[str, Option(ARGUMENT, "RUNS", read=values.runs_folder)] = "runs"
    """The folder of runs, or of one run; a URL too. Default: runs."""
    sort: Annotated[str | None, Option(OPTIONS, "FIELD")] = None
    """Sort by a field of --json, such as accuracy, loss or seconds, largest first. Default: running ones, then the
    newest."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `polytempo doctor`."""

    engine: Annotated[str | None, Option(OPTIONS, "E", complete=engine_names)] = None
    """Measure the hosts of this engine, such as ssh:n1,n2."""
    workers: Annotated[Count | None, Option(OPTIONS, "N")] = None
    """Processes that measure. Default: one a host, or 2."""
    out: Annotated[Path | None, Option(OPTIONS, "FILE")] = None
    """File for the cluster. Default: measured.toml."""
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse options of an engine where there is none."""
        if self.engine is None and (self.workers is not None or self.out is not None):
            raise ValueError("--workers and --out go with --engine, which names the hosts to measure")


@dataclass(frozen=True, kw_only=True)
class StrategiesOptions:
    """Options of `polytempo strategies`."""

    json: Json = False


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Options of `polytempo explain`."""

    strategy: Annotated[str, Option(ARGUMENT, "STRATEGY", read=values.strategy, complete=strategy_names)]
    """Such as 'top_k_sgd(0.01)' or 'local_sgd(period=8, codec=int8)'."""
    workers: Annotated[int, Meta(ge=1, le=4096), Option(OPTIONS, "N")] = 8
    """Number of workers. Default: 8."""
    job: Annotated[str | None, Option(OPTIONS, "JOB", read=values.job, complete=job_names)] = None
    """The job with the model. Default: digits."""
    parameters: Annotated[str | None, Option(OPTIONS, "P", read=_count)] = None
    """Use a perceptron with P parameters instead: 6e6, 250k, 25M."""
    cluster: Annotated[str | None, Option(OPTIONS, "C", read=values.cluster, complete=cluster_names)] = None
    """Say also how long a step takes there: a file of `polytempo calibrate`, or 'ethernet(gbit_per_s=10)'."""
    bucket: Annotated[bool, Option(OPTIONS)] = False
    """Show also the cost of a round of workers that meet in an object store alone (`pt.join_bucket`)."""
    device: Device = "auto"
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.job is not None and self.parameters is not None:
            raise ValueError(f"--job {self.job} has parameters of its own; leave out --parameters {self.parameters}")
        if self.cluster is not None and self.parameters is not None:
            raise ValueError("--cluster simulates the steps of a job; give --job instead of --parameters")


@dataclass(frozen=True, kw_only=True)
class SharpnessOptions:
    """Options of `polytempo sharpness`."""

    run: Annotated[str, Option(ARGUMENT, "RUN", read=values.run_folder)]
    """The folder of a run, as --out names it."""
    epsilon: Annotated[Positive, Option(OPTIONS, "E")] = 1e-3
    """The box of Keskar's measure. Default: 0.001."""
    subspace: Annotated[Count | None, Option(OPTIONS, "P")] = None
    """Measure it in a random subspace of so many dimensions, too."""
    rho: Annotated[Positive, Option(OPTIONS, "R")] = 0.05
    """The radius of SAM's neighbourhood. Default: 0.05."""
    samples: Annotated[Count | None, Option(OPTIONS, "N")] = None
    """Measure on so many training samples, drawn from --seed. Default: all."""
    line: Annotated[str | None, Option(OPTIONS, "RUN2", read=values.run_folder)] = None
    """Draw the loss along the line to the checkpoint of another run."""
    surface: Annotated[bool, Option(OPTIONS)] = False
    """Draw the loss in a plane of two random directions."""
    points: Annotated[Annotated[int, Meta(ge=3, le=501)] | None, Option(OPTIONS, "N")] = None
    """Points along each axis of a picture. Default: 25."""
    width: Annotated[Positive | None, Option(OPTIONS, "W")] = None
    """Extent of a surface in each direction. Default: 1 (a filter)."""
    seed: Annotated[int, Meta(ge=0, le=2**62 - 1), Option(OPTIONS, "S")] = 0
    """Seed of samples, directions and starts. Default: 0."""
    job: Annotated[str | None, Option(OPTIONS, "JOB", read=values.job)] = None
    """The run's job, if the record does not name it."""
    data: Data = None
    threads: Threads = None
    out: Annotated[str | None, Option(OPTIONS, "DIR", read=_picture_folder)] = None
    """Folder for pictures. Default: RUN."""
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse options of pictures where none is asked for."""
        pictures = self.line is not None or self.surface
        for name, needed in (("points", pictures), ("width", self.surface), ("out", pictures)):
            if getattr(self, name) is not None and not needed:
                raise ValueError(f"--{name} is about pictures; give --surface or --line as well")


@dataclass(frozen=True, kw_only=True)
class LookOptions:
    """Options of `polytempo look`."""

    runs: Annotated[tuple[str, ...], Option(ARGUMENT, "RUN", read=_run_folders)]
    """The folders of one or more runs of a job, as --out names them."""
    layer: Annotated[str | None, Option(OPTIONS, "LAYER")] = None
    """Draw the weights and activations of this layer: by the model's own name, or by kind and number, as in conv1."""
    samples: Annotated[Annotated[int, Meta(ge=2, le=100_000)], Option(OPTIONS, "N")] = 1000
    """Compare activations for so many test samples, drawn from --seed. Default: 1000."""
    seed: Annotated[int, Meta(ge=0, le=2**62 - 1), Option(OPTIONS, "S")] = 0
    """Seed of the samples. Default: 0."""
    job: Annotated[str | None, Option(OPTIONS, "JOB", read=values.job)] = None
    """The runs' job, if it does not ship."""
    data: Data = None
    out: Annotated[str | None, Option(OPTIONS, "DIR", read=_picture_folder)] = None
    """Folder for pictures. Default: the first RUN."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """Options of `polytempo chaos`."""

    seeds: Annotated[Count, Option(OPTIONS, "N")] = 1000
    """Number of seeds to run. Default: 1000."""
    first: Annotated[int, Meta(ge=0, le=2**63 - 1), Option(OPTIONS, "S")] = 0
    """The first seed. Default: 0."""
    processes: Annotated[Count | None, Option(OPTIONS, "N")] = None
    """Number of processes. Default: the number of cores."""
    bug: Annotated[str | None, Option(OPTIONS, "NAME")] = None
    """Put this known bug into the code; the checks must find it."""

    def __post_init__(self) -> None:
        """Refuse more processes than the cores can run."""
        cores = len(os.sched_getaffinity(0))
        object.__setattr__(self, "processes", processes := self.processes or cores)
        if min(processes, self.seeds) > (most := _MOST_PER_CORE * cores):
            raise ValueError(
                f"--processes {processes}: must be at most {most} on this machine, {_MOST_PER_CORE} per core"
            )
