"""`polytempo bench`: its commands and their options. A command imports its code when it is called."""

from __future__ import annotations

import typer

from polytempo.cli.bench import bench_parameters as b
from polytempo.cli.bench.bench_values import collectives_values, compression_values, memory_values, training_values
from polytempo.cli.options import parameters as p
from polytempo.cli.options.failure import exit_code

bench = typer.Typer(
    help="Measure Polytempo on this machine, beside gloo and Open MPI.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command()
def collectives(
    context: typer.Context,
    ranks: b.Ranks = None,
    sizes: b.Sizes = None,
    operations: b.Operations = None,
    rounds: b.Rounds = None,
    turn_s: b.Turn = None,
    quick: b.Quick = None,
    out: b.Out = None,
    json: p.Json = None,
) -> None:
    """Measure all-reduce, broadcast, … and the barrier."""
    with exit_code():
        values = collectives_values(given := dict(context.params))
        from polytempo.cli.bench.bench import collectives as command  # imports torch, which takes seconds

        command(values, given)


@bench.command()
def training(
    context: typer.Context,
    models: b.Models = None,
    workers: b.Workers = None,
    rounds: b.Rounds = None,
    turn_s: b.Turn = None,
    quick: b.Quick = None,
    out: b.Out = None,
    json: p.Json = None,
) -> None:
    """Measure samples per second of four models, with one process and with several."""
    with exit_code():
        values = training_values(given := dict(context.params))
        from polytempo.cli.bench.bench import training as command  # imports torch, which takes seconds

        command(values, given)


@bench.command()
def memory(
    context: typer.Context,
    workers: b.Workers = None,
    parameters: b.Parameters = None,
    steps: b.Steps = None,
    quick: b.Quick = None,
    out: b.Out = None,
    json: p.Json = None,
) -> None:
    """Measure the memory that all workers together need to train with Adam."""
    with exit_code():
        values = memory_values(given := dict(context.params))
        from polytempo.cli.bench.bench import memory as command  # imports torch, which takes seconds

        command(values, given)


@bench.command()
def compression(
    context: typer.Context,
    model: b.Model = None,
    link: b.Link = None,
    latency_us: b.Latency = None,
    cluster: b.Cluster = None,
    workers: b.Workers = None,
    codecs: b.Codecs = None,
    rounds: b.Rounds = None,
    quick: b.Quick = None,
    out: b.Out = None,
    json: p.Json = None,
) -> None:
    """Measure for each codec the network speed below which it saves time."""
    with exit_code():
        values = compression_values(given := dict(context.params))
        from polytempo.cli.bench.bench_compression import compression as command  # imports torch, which takes seconds

        command(values, given)
