"""`polytempo plan`: its commands and their options. A command imports its code when it is called.

`polytempo plan JOB` is `polytempo plan run JOB`.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from polytempo.cli.options import parameters as p
from polytempo.cli.options.failure import exit_code
from polytempo.cli.predict import plan_parameters as plans
from polytempo.cli.predict import plan_run_parameters as runs
from polytempo.cli.predict.plan_requests import codecs_of, network_of, plan_request, split_request
from polytempo.cli.predict.plan_run_request import run_plan_request


class JobOrCommand(TyperGroup):
    """Takes a word that is no command for a job, which `run` plans."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """With `run` before a job, or before its options."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


plan = typer.Typer(
    cls=JobOrCommand,
    help="Choose a strategy, workers and a batch: `polytempo plan JOB`. Or plan the layers of a model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@plan.callback()
def options() -> None:
    """Choose a strategy, workers and a batch: `polytempo plan JOB`. Or plan the layers of a model."""


@plan.command()
def run(
    job: p.CutJob,
    until: runs.PlanUntil = None,
    cluster: p.Cluster = None,
    stragglers: p.Stragglers = None,
    workers: runs.WorkerCounts = None,
    batch_sizes: runs.BatchSizes = None,
    strategies: runs.PlanStrategies = None,
    codecs: runs.PlanCodecs = None,
    periods: runs.Periods = None,
    shards: runs.ShardCounts = None,
    stages: runs.StageCounts = None,
    parts: runs.PartCounts = None,
    memory_gb: runs.MemoryGb = None,
    deadline_s: runs.Deadline = None,
    budget: runs.MostMoney = None,
    price: runs.HostPrice = None,
    seed: p.Seed = None,
    data: p.Data = None,
    page: runs.PlanFile = None,
    quote: runs.Quote = None,
    json: p.Json = None,
) -> None:
    """Choose the strategy, the workers and the batch by which JOB reaches a target first, or for the least money.

    Step times are simulated on the cluster without values; samples come from short simulated runs that train. Ctrl-C
    ends the search, and shows what was found.
    """
    with exit_code():
        shared = {"until": until, "cluster": cluster, "stragglers": stragglers, "seed": seed, "data": data}
        lists = {"workers": workers, "batch_sizes": batch_sizes, "strategies": strategies, "codecs": codecs}
        lists |= {"periods": periods, "shards": shards, "stages": stages, "parts": parts}
        limits = {"memory_gb": memory_gb, "deadline_s": deadline_s, "budget": budget, "price": price}
        asked = run_plan_request(job, shared, lists, limits, page)
        from polytempo.cli.predict.plan_run import plan_run as command  # imports torch, which takes seconds

        command(asked, page=page, quote=bool(quote), as_json=bool(json))


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
    activations: plans.LayerActivationCodec = None,
    gradients: p.GradientCodec = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Say for each layer of JOB's model whether data or model parallelism sends less.

    |W| are a layer's weights, |D| what it is given for the samples of a step. Nothing is computed or sent.
    """
    with exit_code():
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        network, codecs = network_of(link, latency_us, cluster), codecs_of(activations, gradients)
        asked = plan_request(job, workers, network, sizes, reduction, shards, by, codecs)
        from polytempo.cli.predict.plan_layers import plan_layers as command  # imports torch, which takes seconds

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
    activations: plans.LayerActivationCodec = None,
    gradients: p.GradientCodec = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Say how to split each layer of JOB's model over workers that hold it together, so that they send the least.

    Prints the strategy that does it, and whether the link makes a step slower. Nothing is computed or sent.
    """
    with exit_code():
        network, codecs = network_of(link, latency_us, cluster), codecs_of(activations, gradients)
        asked = split_request(job, parts, network, gflops, batch_size, codecs)
        from polytempo.cli.predict.plan_split import plan_split as command  # imports torch, which takes seconds

        command(asked, data, as_json=bool(json))
