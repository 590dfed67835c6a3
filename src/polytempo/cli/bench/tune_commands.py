"""`polytempo tune`: its commands and their options. A command imports its code when it is called."""

from __future__ import annotations

import typer

from polytempo.cli.bench.tune_options import TuneBatchOptions, TuneThreadsOptions
from polytempo.cli.options.command_line import takes

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
    from polytempo.cli.bench.tune_batch import tune_batch as command  # imports torch, which takes seconds

    command(asked)


@tune.command()
@takes(TuneThreadsOptions)
def threads(asked: TuneThreadsOptions) -> None:
    """Measure how JOB divides the cores best: over workers, threads of operations, and threads of branches.

    Each division trains for moments, in turns with all others; the one of the highest median is named, with its margin.
    """
    from polytempo.cli.bench.tune_threads import tune_threads as command  # imports torch, which takes seconds

    command(asked)
