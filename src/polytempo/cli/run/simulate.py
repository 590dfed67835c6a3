"""`polytempo simulate`."""

from __future__ import annotations

import sys

import typer

from polytempo.cli.options.measured_hosts import say_beyond_measured
from polytempo.cli.options.plan import check_url, found_job, show_plan
from polytempo.cli.options.request import RunRequest
from polytempo.cli.options.show import notes_on_stderr, say_unreached, show_json, show_result
from polytempo.cluster import Cluster
from polytempo.device import HOST, accelerator_kind
from polytempo.planner.bound_price import reported_with_price
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
    _say_device(cluster, command.cluster, taken.device)
    with notes_on_stderr():
        result = simulated(
            *(job, strategy, command.workers, cluster, taken),
            meta=command.meta,
            batched=command.batched,
            progress=Progress(),
        )
    if command.cluster is not None:
        result = reported_with_price(result, job, taken.data, cluster, taken.out)
    figures = result.as_json()
    (show_json if command.json else show_result)(figures)
    if say_unreached([figures]):
        raise typer.Exit(1)


def _say_device(found: Cluster, cluster: str | None, device: str) -> None:
    """Say on standard error which device the times are of, if the cluster was measured and a device is in question."""
    kind = device.partition(":")[0]
    if found.device is not None and kind != HOST.type:
        print(f"note: {cluster} was measured on {found.device.name}; times are of workers on it", file=sys.stderr)
    elif found.speeds is not None and (kind not in ("auto", HOST.type) or (kind == "auto" and accelerator_kind())):
        print(
            f"note: {cluster} has no measurements of a device, so times are the host's; measure one with "
            "`polytempo calibrate --device`",
            file=sys.stderr,
        )
