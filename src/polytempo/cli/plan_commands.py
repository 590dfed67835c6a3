"""`polytempo plan`: its commands and their options. A command imports its code when it is called."""

from __future__ import annotations

import typer

from polytempo.cli import parameters as p
from polytempo.cli import plan_parameters as plans
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
    workers: plans.PlanWorkers = None,
    link: plans.PlanLink = None,
    latency_us: plans.LatencyUs = None,
    cluster: plans.PlanCluster = None,
    batch_size: p.BatchSize = None,
    global_batch_size: p.GlobalBatchSize = None,
    reduction: plans.PlanReduction = None,
    shards: plans.PlanShards = None,
    by: plans.PlanBy = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Say for each layer of JOB's model whether data or model parallelism sends less.

    |W| are a layer's weights, |D| what it is given for the samples of a step. Nothing is computed or sent.
    """
    with exit_code():
        from polytempo.cli.plan_requests import network_of, plan_request  # imports pydantic

        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        asked = plan_request(job, workers, network_of(link, latency_us, cluster), sizes, reduction, shards, by)
        from polytempo.cli.plan_layers import plan_layers as command  # imports torch, which takes seconds

        command(asked, data, as_json=bool(json))


@plan.command()
def split(
    job: p.CutJob,
    parts: plans.SplitParts = None,
    link: plans.PlanLink = None,
    latency_us: plans.LatencyUs = None,
    cluster: plans.PlanCluster = None,
    gflops: plans.Gflops = None,
    batch_size: p.BatchSize = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Say how to split each layer of JOB's model over workers that hold it together, so that they send the least.

    Prints the strategy that does it, and whether the link makes a step slower. Nothing is computed or sent.
    """
    with exit_code():
        from polytempo.cli.plan_requests import network_of, split_request  # imports pydantic

        asked = split_request(job, parts, network_of(link, latency_us, cluster), gflops, batch_size)
        from polytempo.cli.plan_split import plan_split as command  # imports torch, which takes seconds

        command(asked, data, as_json=bool(json))
