"""`polytempo train`."""

from __future__ import annotations

import typer

from polytempo.cli.options.plan import check_url, found_job, show_plan
from polytempo.cli.options.request import RunRequest
from polytempo.cli.options.show import notes_on_stderr, say_unreached, show_json, show_result
from polytempo.device import HOST
from polytempo.engines.engine import parse_engine
from polytempo.planner.bound_price import reported_with_price
from polytempo.report.status.progress import Progress
from polytempo.runs.elastic.available_program import AvailableProgram
from polytempo.runs.run import join, run
from polytempo.runs.simulated.asked_device import device_of, on_asked_device
from polytempo.spec.text.catalogue import parse_cluster, parse_strategy


def train(request: RunRequest) -> None:
    """Train with worker processes of this host, or as one worker of the world that this process was started in."""
    command, taken, world, engine_name = request
    strategy = parse_strategy(command.strategy)
    cluster = None if command.cluster is None else on_asked_device(parse_cluster(command.cluster), taken.device)
    with notes_on_stderr():
        job = found_job(request.job)
    check_url(taken)
    first = world.rank == 0
    if command.dry_run:
        if first:
            num_workers = world.size if world.size > 1 else command.workers
            show_plan(job, [strategy], "process", num_workers, taken, as_json=command.json)
        return
    with notes_on_stderr():
        progress = Progress() if first else None
        if world.size > 1:
            if taken.elastic:
                raise ValueError(
                    f"--min-workers and --max-workers: this process is one of {world.size} workers of another "
                    "launcher, which replaces them; leave the two out, or run the command outside of it"
                )
            result = join(job, strategy, taken, progress=progress)
        else:
            engine = parse_engine(engine_name)
            available = None if command.available is None else AvailableProgram(command.available, command.workers)
            try:
                result = run(
                    job, strategy, command.workers, taken, engine=engine, progress=progress, available=available
                )
            finally:
                if available is not None:
                    available.close()
    if first and cluster is not None and taken.out is not None:
        device = HOST.type if device_of(taken.out) == HOST.type else taken.device
        result = reported_with_price(result, job, taken.data, on_asked_device(cluster, device), taken.out)
    figures = result.as_json()
    if first:
        (show_json if command.json else show_result)(figures)
    if say_unreached([figures] if first else []):
        raise typer.Exit(1)
