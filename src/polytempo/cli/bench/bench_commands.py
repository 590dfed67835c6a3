"""`polytempo bench`: its commands and their options. A command imports its code when it is called."""

from __future__ import annotations

import typer

from polytempo.cli.bench.bench_options import (
    CollectivesOptions,
    CompressionOptions,
    MemoryOptions,
    TrainingOptions,
)
from polytempo.cli.options.command_line import takes

bench = typer.Typer(
    help="Measure Polytempo on this machine, beside gloo and Open MPI.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command()
@takes(CollectivesOptions)
def collectives(asked: CollectivesOptions) -> None:
    """Measure all-reduce, broadcast, … and the barrier."""
    from polytempo.cli.bench.bench import collectives as command  # imports torch, which takes seconds

    command(asked)


@bench.command()
@takes(TrainingOptions)
def training(asked: TrainingOptions) -> None:
    """Measure samples per second of four models, with one process and with several."""
    from polytempo.cli.bench.bench import training as command  # imports torch, which takes seconds

    command(asked)


@bench.command()
@takes(MemoryOptions)
def memory(asked: MemoryOptions) -> None:
    """Measure the memory that all workers together need to train with Adam."""
    from polytempo.cli.bench.bench import memory as command  # imports torch, which takes seconds

    command(asked)


@bench.command()
@takes(CompressionOptions)
def compression(asked: CompressionOptions) -> None:
    """Measure for each codec the network speed below which it saves time."""
    from polytempo.cli.bench.bench_compression import compression as command  # imports torch, which takes seconds

    command(asked)
