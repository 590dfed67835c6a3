"""`polytempo train`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import typer

from polytempo.cli.catalogue import strategy_from
from polytempo.cli.folder import checked_folder, default_folder
from polytempo.cli.options import TrainOptions, train_options
from polytempo.cli.plan import job_of, progress_of, run_name, run_options, show_plan
from polytempo.cli.show import notes_on_stderr, say_unreached, show_json, show_result
from polytempo.engines.environment import recognise
from polytempo.engines.run import join, run


def train(given: Mapping[str, object], config: Path | None) -> None:
    """Train with worker processes of this host, or as one worker of the world that this process was started in."""
    options = train_options(given, config)
    world = recognise(os.environ)
    strategy = strategy_from(options.strategy)
    with notes_on_stderr():
        job = job_of(options)
    taken = run_options(options, _folder(options, shared=world.size > 1))
    first = world.rank == 0
    if options.dry_run:
        if first:
            num_workers = world.size if world.size > 1 else options.workers
            show_plan(job, [strategy.name], "process", num_workers, taken, as_json=options.as_json)
        return
    with notes_on_stderr():
        progress = progress_of(job, taken) if first else None
        if world.size > 1:
            result = join(job, strategy, taken, progress=progress)
        else:
            result = run(job, strategy, options.workers, taken, progress=progress)
    figures = result.as_json()
    if first:
        (show_json if options.as_json else show_result)(figures)
    if say_unreached([figures] if first else []):
        raise typer.Exit(1)


def _folder(options: TrainOptions, *, shared: bool) -> Path:
    """Where the run's files go. Workers that were started apart must all come to the same answer by themselves."""
    name = run_name(options, options.strategy)
    if options.out is not None or shared:
        return checked_folder(options.out or Path("runs") / name, resume=options.resume, force=options.force)
    return default_folder(name, resume=options.resume)
