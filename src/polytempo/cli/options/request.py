"""What a command is asked to do: options, names and folder, checked before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import NamedTuple

from polytempo import jobs
from polytempo.cli.options.command_options import CommandOptions, GivenOptions, given_options, url_of
from polytempo.cli.options.completion import CUT_GOALS
from polytempo.cli.options.folder import checked_folder, default_folder
from polytempo.engines.engine_name import EngineName
from polytempo.engines.join.environment import RankPlace, recognise
from polytempo.runs.frame.folder_names import slug
from polytempo.spec.options import RunOptions
from polytempo.spec.text.call import split_calls
from polytempo.spec.text.declaration import declared
from polytempo.spec.text.names import BUSY, COMPARED

_STOPS = ("step", "ticket", "version")
_MOST_PER_CORE = 16
_MOST_POINTS = 501


class ChaosRequest(NamedTuple):
    """The seeds `first … first + seeds - 1`, and how many processes share them."""

    seeds: int
    first: int
    processes: int


class CutRequest(NamedTuple):
    """A job whose model is to be cut, into how many stages, and by what."""

    job: str
    stages: int | None
    by: str | list[str] | None
    """What is the least, or the names of layers that begin stages. None: the operations of the largest stage."""
    batch_size: int | None
    activations: str | None = None
    gradients: str | None = None
    """Codecs by which tensors pass between stages, and their gradients back, as they are written."""
    gbit_per_s: float | None = None
    """Of the links between stages; None: messages take no time."""


class TuneRequest(NamedTuple):
    """A job whose batch size and learning rate are to be recommended."""

    job: str
    workers: int | None
    """None: their number is recommended, too."""
    extra: float
    budget: float
    seed: int


class ScheduleRequest(NamedTuple):
    """A scheduled program, its data, and where it runs."""

    program: str
    data: str | None
    workers: int
    sweeps: int
    tolerance: float
    cluster: str | None
    """None: real processes."""
    stragglers: str | None
    seed: int
    timeout_s: float


class SharpnessRequest(NamedTuple):
    """A run whose checkpoint is measured, and how; None: the default."""

    run: str
    job: str | None
    epsilon: float | None
    subspace: int | None
    rho: float | None
    samples: int | None
    seed: int | None
    line: str | None
    """Another run, to which a line is drawn."""
    surface: bool
    points: int | None
    width: float | None
    out: str | None


class RunRequest(NamedTuple):
    """What a command that runs a job is asked to do, with a folder that is free for it."""

    command: CommandOptions
    options: RunOptions
    world: RankPlace
    """The launcher's world, which this process may be a rank of."""
    engine: EngineName

    @property
    def job(self) -> str:
        """The job's name, which `check_job` has seen."""
        assert self.command.job is not None
        return self.command.job


def train_request(given: Mapping[str, object], config: Path | None) -> RunRequest:
    """What `polytempo train` is asked to do. `ValueError` for what it cannot."""
    asked = given_options(given, config)
    check_strategies(asked.command.strategy)
    check_job(asked.command.job)
    world = recognise(os.environ)
    name = _run_name(asked, asked.command.strategy)
    if world.size > 1 and asked.run.get("out") is None:  # workers that start apart choose the same folder
        asked.run["out"] = Path("runs") / name
    return _request(asked, name, world)


def submit_request(given: Mapping[str, object], config: Path | None) -> RunRequest:
    """`train_request` for a job of Slurm, which starts again: a folder that is new each time holds no checkpoint."""
    request = train_request(given, config)
    if given_options(given, config).run.get("out") is None:
        raise ValueError("name the run's folder with --out: where the job starts again, the run goes on from there")
    return request


def compare_request(given: Mapping[str, object], config: Path | None) -> RunRequest:
    """What `polytempo compare` is asked to do."""
    asked = given_options(given, config)
    check_strategies(asked.command.strategies or COMPARED)
    check_job(asked.command.job)
    world = recognise(os.environ)
    return _request(asked, _run_name(asked, "compare"), world)


def simulate_request(given: Mapping[str, object], config: Path | None) -> RunRequest:
    """What `polytempo simulate` is asked to do."""
    asked = given_options(given, config)
    if asked.run.get("resume"):
        raise ValueError("--resume: a simulation cannot be resumed; run it again, the same seed gives the same result")
    check_strategies(asked.command.strategy)
    check_cluster(asked.command.cluster, asked.command.stragglers)
    check_job(asked.command.job)
    return _request(asked, _run_name(asked, asked.command.strategy, "simulated"), recognise({}))


def check_cluster(cluster: str | None, stragglers: str | None) -> None:
    """ValueError for a cluster or a distribution that does not exist."""
    if cluster is not None and cluster.endswith(".toml"):
        if not Path(cluster).is_file():
            raise ValueError(f"--cluster {cluster}: there is no such file; `polytempo calibrate` writes one")
    elif cluster is not None:
        declared().cluster(cluster)
    if stragglers is not None and stragglers != BUSY:  # which the file of a cluster may have
        declared().distribution(stragglers)


def schedule_request(
    program: str,
    data: str | None,
    cluster: str | None,
    stragglers: str | None,
    numbers: Mapping[str, int | float | None],
) -> ScheduleRequest:
    """What `polytempo schedule` is asked to do. `ValueError` for what it cannot."""
    declared().program(program)
    declared().data_of_program(program, data)
    for name, number in numbers.items():
        least = 0 if name in ("tolerance", "seed") else 1
        if number is not None and not least <= number < inf:
            raise ValueError(f"--{name.replace('_', '-')} {number:g}: must be at least {least}")
    if stragglers is not None and cluster is None:
        raise ValueError(f"--stragglers {stragglers}: only simulated workers straggle; add --cluster ethernet")
    if numbers["seed"] is not None and cluster is None:
        raise ValueError(
            f"--seed {numbers['seed']} draws the stragglers of simulated workers; write the program's own into its "
            "call, such as 'lasso(seed=1)', or add --cluster"
        )
    check_cluster(cluster, stragglers)
    usual = {"workers": 2, "sweeps": 100, "tolerance": 1e-6, "seed": 0, "timeout_s": 300.0}
    given = {**usual, **{name: number for name, number in numbers.items() if number is not None}}
    return ScheduleRequest(
        *(program, data, int(given["workers"]), int(given["sweeps"]), given["tolerance"], cluster, stragglers),
        *(int(given["seed"]), given["timeout_s"]),
    )


def check_explained(strategy: str, job: str | None) -> None:
    """ValueError for a strategy or job that `polytempo explain` cannot find."""
    if not strategy.strip():
        raise ValueError(f"STRATEGY {strategy!r}: the value is empty; write a strategy, such as 'top_k_sgd(0.01)'")
    check_strategies(strategy)
    if job is not None:
        jobs.check(job)


def cut_request(asked: CutRequest) -> CutRequest:
    """What `polytempo cut` is asked to do, with what was left out. `ValueError` for what it cannot."""
    for name, number in (("stages", asked.stages), ("batch-size", asked.batch_size)):
        if number is not None and number < 1:
            raise ValueError(f"--{name} {number}: must be at least 1")
    if asked.gbit_per_s is not None and not 0 < asked.gbit_per_s < inf:
        raise ValueError(f"--gbit-per-s {asked.gbit_per_s:g}: must be above 0")
    for codec in (asked.activations, asked.gradients):
        if codec is not None:
            declared().codec(codec)
    goal = (asked.by if isinstance(asked.by, str) else CUT_GOALS[0]).strip()
    names = [each.strip() for each in goal.split(",")]
    if not all(names):
        raise ValueError(f"--by {goal}: a name is empty; write names of layers with commas between")
    if close := get_close_matches(goal, set(CUT_GOALS) - {goal}, n=1, cutoff=0.75):
        raise ValueError(f"--by {goal}: did you mean {close[0]}? There are: {', '.join(CUT_GOALS)}, or names of layers")
    jobs.check(asked.job)
    return asked._replace(stages=asked.stages or 2, by=goal) if goal in CUT_GOALS else asked._replace(by=names)


def tune_request(
    job: str, workers: int | None, extra: float | None, budget: float | None, seed: int | None
) -> TuneRequest:
    """What `polytempo tune batch` is asked to do. `ValueError` for what it cannot."""
    if workers is not None and workers < 1:
        raise ValueError(f"--workers {workers}: must be at least 1")
    for name, number in (("extra", extra), ("budget", budget)):
        if number is not None and not 0 < number < inf:
            raise ValueError(f"--{name} {number:g}: must be above 0")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: must be at least 0 and below 2^63")
    jobs.check(job)
    return TuneRequest(job, workers, extra or 0.1, budget or 0.75, seed or 0)


def sharpness_request(asked: SharpnessRequest) -> SharpnessRequest:
    """What `polytempo sharpness` is asked to do. `ValueError` for what it cannot."""
    for name in ("epsilon", "rho", "width", "subspace", "samples"):
        number = getattr(asked, name)
        if number is not None and not 0 < number < inf:
            raise ValueError(f"--{name} {number:g}: must be above 0")
    if asked.seed is not None and not 0 <= asked.seed < 2**62:
        raise ValueError(f"--seed {asked.seed}: must be at least 0 and below 2**62")
    if asked.points is not None and not 3 <= asked.points <= _MOST_POINTS:
        raise ValueError(f"--points {asked.points}: must be between 3 and {_MOST_POINTS}")
    for name, needs in (
        ("points", asked.line or asked.surface),
        ("width", asked.surface),
        ("out", asked.line or asked.surface),
    ):
        if getattr(asked, name) is not None and not needs:
            raise ValueError(f"--{name} is about pictures; give --surface or --line as well")
    for folder in (asked.run, asked.line):
        if folder is not None and "://" not in folder and not Path(folder).is_dir():
            raise ValueError(
                f"{folder}: there is no such folder; name the folder of a run, or of one of its checkpoints"
            )
    if asked.out is not None and "://" not in asked.out and not Path(asked.out).is_dir():
        raise ValueError(f"--out {asked.out}: there is no such folder; make it, or leave --out out")
    if asked.job is not None:
        jobs.check(asked.job)
    return asked


def check_replay(run: Path, until: str | None, job: str | None) -> None:
    """ValueError for a folder, a place to stop or a job that `polytempo replay` cannot find."""
    if url_of(run):
        raise ValueError(
            f"{url_of(run)}: where a URL names a run's folder there is no record, so it cannot be replayed"
        )
    if not run.is_dir():
        raise ValueError(f"{run}: there is no such folder; name the folder of a run")
    if until is not None:
        stop_of(until)
    if job is not None:
        jobs.check(job)


def stop_of(text: str) -> tuple[str, int]:
    """Where a replay stops: `step=K`, `ticket=T` or `version=V`. `ValueError` where it is none of these."""
    kind, equals, number = (part.strip() for part in text.partition("="))
    if kind not in _STOPS or not equals or not number.isdecimal() or int(number) < (kind != "ticket"):
        raise ValueError(
            f"--until {text}: must be written step=K or version=K with K >= 1, or ticket=T with T >= 0, as in step=100"
        )
    return kind, int(number)


def chaos_request(seeds: int | None, first: int | None, processes: int | None) -> ChaosRequest:
    """How many seeds of which simulations in how many processes. `ValueError` for what cannot be."""
    cores = len(os.sched_getaffinity(0))
    asked = ChaosRequest(
        seeds=1000 if seeds is None else seeds, first=first or 0, processes=cores if processes is None else processes
    )
    if asked.seeds < 1 or asked.processes < 1 or asked.first < 0:
        raise ValueError(
            "--seeds and --processes must be at least 1, --first at least 0; got "
            f"seeds={asked.seeds}, processes={asked.processes}, first={asked.first}"
        )
    most = _MOST_PER_CORE * cores
    if min(asked.processes, asked.seeds) > most:
        raise ValueError(
            f"--processes {asked.processes}: must be at most {most} on this machine, {_MOST_PER_CORE} per core"
        )
    return asked


def check_strategies(text: str) -> None:
    """ValueError for the first strategy of a list whose name or arguments do not exist."""
    for each in split_calls(text):
        declared().strategy(each)


def check_job(text: str | None) -> None:
    """ValueError where no job is named, or there is none of this name."""
    if text is None:
        raise ValueError(f"name a job: {', '.join(sorted(jobs.names()))}, {jobs.FORMS}")
    jobs.check(text)


def _engine_in(world: RankPlace, text: str) -> EngineName:
    """Refuse an engine that does not exist, and one inside a world that another launcher has started (ValueError)."""
    engine = EngineName.of(text)
    if world.size > 1 and engine.name != "local":
        raise ValueError(
            f"--engine {engine}: this process is one of {world.size} workers of {world.launcher}; "
            "leave --engine out to be one of them, or start polytempo outside of it"
        )
    return engine


def _run_name(asked: GivenOptions, *further: str) -> str:
    """The name of a run's folder: the job's, then what tells it from the job's other runs."""
    return "-".join([slug(Path(asked.command.job or "job").name), *map(slug, further)])


def _request(asked: GivenOptions, name: str, world: RankPlace) -> RunRequest:
    """The request, with the folder that is named, or a new one under `runs/`; with `--resume` that of the last run.

    A URL has not been looked at: that takes torch.
    """
    engine = _engine_in(world, asked.command.engine)
    out, resume = asked.run.get("out"), asked.run.get("resume", False)
    if out is None:
        out = default_folder(name, resume=resume)
    elif isinstance(out, Path):
        out = checked_folder(out, resume=resume, force=asked.command.force)
    return RunRequest(asked.command, RunOptions(**asked.run | {"out": out}), world, engine)
