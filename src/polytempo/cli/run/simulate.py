"""`polytempo simulate`."""

from __future__ import annotations

import typer

from polytempo.cli.options.measured_hosts import say_beyond_measured
from polytempo.cli.options.plan import found_job, run_options, show_plan
from polytempo.cli.options.request import RunRequest
from polytempo.cli.options.show import notes_on_stderr, say_unreached, show_json, show_result
from polytempo.report.status.progress import Progress
from polytempo.runs.simulated.simulate import default_cluster
from polytempo.runs.simulated.simulate import simulate as simulated
from polytempo.spec.text.catalogue import parse_cluster, parse_strategy


def simulate(request: RunRequest) -> None:
    """Train with virtual workers on the cluster that is described."""
    options = request.options
    strategy = parse_strategy(options.strategy)
    cluster = parse_cluster(options.cluster or default_cluster(strategy, options.workers), options.stragglers)
    with notes_on_stderr():
        job = found_job(request.job)
    taken = run_options(request)
    if options.dry_run:
        world = f"virtual: {cluster.name}"
        show_plan(job, [strategy.name], world, options.workers, taken, as_json=options.as_json)
        return
    say_beyond_measured(options.cluster, options.workers)
    with notes_on_stderr():
        result = simulated(
            *(job, strategy, options.workers, cluster, taken),
            meta=options.meta,
            batched=options.batched,
            progress=Progress(),
        )
    figures = result.as_json()
    (show_json if options.as_json else show_result)(figures)
    if say_unreached([figures]):
        raise typer.Exit(1)
