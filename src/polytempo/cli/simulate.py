"""`polytempo simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from polytempo.cli.catalogue import cluster_from, strategy_from
from polytempo.cli.folder import checked_folder, default_folder
from polytempo.cli.options import train_options
from polytempo.cli.plan import job_of, progress_of, run_name, run_options, show_plan
from polytempo.cli.show import notes_on_stderr, say_unreached, show_json, show_result
from polytempo.engines.simulate import default_cluster
from polytempo.engines.simulate import simulate as simulated


def simulate(given: Mapping[str, object], config: Path | None) -> None:
    """Train with virtual workers on the cluster that is described."""
    options = train_options(given, config)
    if options.resume:
        raise ValueError("--resume: a simulation is not resumed; the same seed gives the same run, so begin again")
    strategy = strategy_from(options.strategy)
    cluster = cluster_from(options.cluster or default_cluster(strategy, options.workers), options.stragglers)
    with notes_on_stderr():
        job = job_of(options)
    name = run_name(options, options.strategy, "simulated")
    out = default_folder(name, resume=False)
    if options.out is not None:
        out = checked_folder(options.out, resume=False, force=options.force)
    taken = run_options(options, out)
    if options.dry_run:
        world = f"virtual: {cluster.name}"
        show_plan(job, [strategy.name], world, options.workers, taken, as_json=options.as_json)
        return
    with notes_on_stderr():
        result = simulated(
            job, strategy, options.workers, cluster, taken, meta=options.meta, progress=progress_of(job, taken)
        )
    figures = result.as_json()
    (show_json if options.as_json else show_result)(figures)
    if say_unreached([figures]):
        raise typer.Exit(1)
