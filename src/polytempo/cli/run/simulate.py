"""`polytempo simulate`."""

from __future__ import annotations

import typer

from polytempo.cli.options.measured_hosts import say_beyond_measured, say_device
from polytempo.cli.options.plan import check_url, found_job, show_plan
from polytempo.cli.options.request import RunRequest
from polytempo.cli.options.show import notes_on_stderr, say_unreached, show_json, show_result
from polytempo.report.status.progress import Progress
from polytempo.runs.simulated.simulate import default_cluster
from polytempo.runs.simulated.simulate import simulate as simulated
from polytempo.runs.simulated.simulation_checks import check_simulation
from polytempo.spec.text.catalogue import parse_cluster, parse_strategy


def simulate(request: RunRequest) -> None:
    """Train with virtual workers on the cluster that is described."""
    command, taken, _, _ = request
    strategy = parse_strategy(command.strategy)
    cluster = parse_cluster(command.cluster or default_cluster(strategy, command.workers), command.stragglers)
    with notes_on_stderr():
        job = found_job(request.job)
    check_url(taken)
    if command.dry_run:
        check_simulation(strategy, taken, meta=command.meta, batched=command.batched)
        world = f"virtual: {cluster.name}"
        show_plan(job, [strategy], world, command.workers, taken, as_json=command.json)
        return
    say_beyond_measured(command.cluster, command.workers)
    say_device(cluster, command.cluster, taken.device)
    with notes_on_stderr():
        result = simulated(
            *(job, strategy, command.workers, cluster, taken),
            meta=command.meta,
            batched=command.batched,
            progress=Progress(),
        )
    figures = result.as_json()
    (show_json if command.json else show_result)(figures)
    if say_unreached([figures]):
        raise typer.Exit(1)
