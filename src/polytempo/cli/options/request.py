"""Requests to run a job: options and folder, checked before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from polytempo import jobs
from polytempo.cli.options.command_options import CommandOptions, GivenOptions, given_options
from polytempo.cli.options.folder import checked_folder, default_folder
from polytempo.engines.engine_name import EngineName
from polytempo.engines.join.environment import RankPlace, recognise
from polytempo.runs.frame.folder_names import slug
from polytempo.spec.run_options import RunOptions


class RunRequest(NamedTuple):
    """A request to run a job, with a folder that is free for it."""

    command: CommandOptions
    options: RunOptions
    world: RankPlace
    """The launcher's world, which this process may be a rank of."""
    engine: EngineName

    @property
    def job(self) -> str:
        """The job's name, which a request must have."""
        assert self.command.job is not None
        return self.command.job


def train_request(given: Mapping[str, object], config: Path | None) -> RunRequest:
    """The request of `polytempo train`. `ValueError` for an impossible one."""
    asked = _asked(given, config)
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
    """The request of `polytempo compare`."""
    asked = _asked(given, config)
    world = recognise(os.environ)
    return _request(asked, _run_name(asked, "compare"), world)


def sweep_request(given: Mapping[str, object], config: Path | None) -> RunRequest:
    """The request of `polytempo sweep`."""
    asked = _asked(given, config)
    if not asked.command.over:
        raise ValueError("a sweep needs settings to try; give --over lr=1e-4..1e-1:log, or --over batch_size=16|32|64")
    return _request(asked, _run_name(asked, "sweep"), recognise({}))


def simulate_request(given: Mapping[str, object], config: Path | None) -> RunRequest:
    """The request of `polytempo simulate`."""
    asked = _asked(given, config)
    if asked.run.get("resume"):
        raise ValueError("--resume: a simulation cannot be resumed; run it again, the same seed gives the same result")
    return _request(asked, _run_name(asked, asked.command.strategy, "simulated"), recognise({}))


def _asked(given: Mapping[str, object], config: Path | None) -> GivenOptions:
    """The options. ValueError where no job is named."""
    asked = given_options(given, config)
    if asked.command.job is None:
        raise ValueError(f"name a job: {', '.join(sorted(jobs.names()))}, {jobs.FORMS}")
    return asked


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
    """The name of a run's folder: the job's, then the run's own words."""
    return "-".join([slug(Path(asked.command.job or "job").name.removesuffix(".toml")), *map(slug, further)])


def _request(asked: GivenOptions, name: str, world: RankPlace) -> RunRequest:
    """The request, with the named folder, or a new one under `runs/`; with `--resume` the folder of the last run.

    A URL has not been looked at: that takes torch.
    """
    engine = _engine_in(world, asked.command.engine)
    out, resume = asked.run.get("out"), asked.run.get("resume", False)
    if out is None:
        out = default_folder(name, resume=resume)
    elif isinstance(out, Path):
        out = checked_folder(out, resume=resume, force=asked.command.force)
    return RunRequest(asked.command, RunOptions(**asked.run | {"out": out}), world, engine)
