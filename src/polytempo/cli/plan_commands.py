"""`polytempo plan`: its commands and their options. A command imports its code when it is called."""

from __future__ import annotations

import typer

from polytempo.cli import parameters as p
from polytempo.cli.failure import exit_code

plan = typer.Typer(
    help="Work out what a model would send over a network, without training it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@plan.callback()
def options() -> None:
    """Work out what a model would send over a network, without training it."""


@plan.command()
def layers(
    job: p.CutJob,
    workers: p.PlanWorkers = None,
    link: p.PlanLink = None,
    latency_us: p.LatencyUs = None,
    batch_size: p.BatchSize = None,
    global_batch_size: p.GlobalBatchSize = None,
    reduction: p.PlanReduction = None,
    shards: p.PlanShards = None,
    by: p.PlanBy = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Say for each layer of JOB's model whether data or model parallelism sends less.

    |W| are a layer's weights, |D| what it is given for the samples of a step. Nothing is computed or sent.
    """
    with exit_code():
        from polytempo.cli.request import plan_request  # imports pydantic

        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        asked = plan_request(job, workers, link, latency_us, sizes, reduction, shards, by)
        from polytempo.cli.plan_layers import plan_layers as command  # imports torch, which takes seconds

        command(asked, data, as_json=bool(json))
