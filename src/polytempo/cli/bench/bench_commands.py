"""`polytempo bench` and `polytempo tune`. A command imports its code when it is called."""

from __future__ import annotations

import typer

from polytempo.cli.bench.bench_options import (
    CollectivesOptions,
    CompressionOptions,
    MemoryOptions,
    TrainingOptions,
    TuneBatchOptions,
    TuneRateOptions,
    TuneThreadsOptions,
)
from polytempo.cli.options.command_line import takes
from polytempo.cli.options.shown_page import page_of

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
    from polytempo.cli.bench.bench import compression as command  # imports torch, which takes seconds

    command(asked)


tune = typer.Typer(
    help="Recommend settings of a job, from short runs on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@tune.callback()
def options() -> None:
    """Recommend settings of a job, from short runs on this machine."""


@tune.command()
@takes(TuneBatchOptions)
def batch(asked: TuneBatchOptions) -> None:
    """Recommend a batch size, a number of workers and a learning rate for JOB, with the evidence.

    The noise scale says how large a batch may be, a range test and short runs which rate it needs.
    """
    with page_of(asked.out if asked.ui else None, several=True):
        from polytempo.cli.bench.tune_batch import tune_batch as command  # imports torch, which takes seconds

        command(asked)


@tune.command()
@takes(TuneRateOptions)
def rate(asked: TuneRateOptions) -> None:
    """Find a learning rate for JOB with a strategy: train while the rate grows, until the loss does.

    The run is simulated in this process; no folder is written.
    """
    from polytempo.cli.bench.tune_rate import tune_rate as command  # imports torch, which takes seconds

    command(asked)


@tune.command()
@takes(TuneThreadsOptions)
def threads(asked: TuneThreadsOptions) -> None:
    """Measure how JOB divides the cores best: over workers, threads of operations, and threads of branches.

    Each division trains for moments, in turns with all others; the one of the highest median is named, with its margin.
    """
    from polytempo.cli.bench.tune_threads import tune_threads as command  # imports torch, which takes seconds

    command(asked)
