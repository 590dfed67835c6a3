"""`polytempo tune`: its commands and their options. A command imports its code when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from polytempo.cli.options import grid_parameters as g
from polytempo.cli.options import parameters as p
from polytempo.cli.options.failure import exit_code
from polytempo.cli.options.request import tune_request

TuneWorkers = Annotated[
    int | None, typer.Option("--workers", metavar="N", help="Number of workers. Default: it is recommended, too.")
]
ExtraSamples = Annotated[
    float | None,
    typer.Option(
        "--extra", metavar="X", help="Samples that the batch may cost beyond what small ones take. Default: 0.1, 10 %."
    ),
]
TuneBudget = Annotated[
    float | None,
    typer.Option("--budget", metavar="R", help="What the advice may cost, in runs of the job's epochs. Default: 0.75."),
]

tune = typer.Typer(
    help="Recommend settings of a job, from short runs on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@tune.callback()
def options() -> None:
    """Recommend settings of a job, from short runs on this machine."""


@tune.command()
def batch(
    job: p.CutJob,
    workers: TuneWorkers = None,
    extra: ExtraSamples = None,
    budget: TuneBudget = None,
    seed: p.Seed = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Recommend a batch size, a number of workers and a learning rate for JOB, with the evidence.

    The noise scale says how large a batch may be, a range test and short runs which rate it needs.
    """
    with exit_code():
        asked = tune_request(job, workers, extra, budget, seed)
        from polytempo.cli.bench.tune_batch import tune_batch as command  # imports torch, which takes seconds

        command(asked, data, as_json=bool(json))


@tune.command()
def threads(
    job: p.CutJob,
    cores: g.Cores = None,
    batch_size: p.BatchSize = None,
    global_batch_size: p.GlobalBatchSize = None,
    rounds: g.GridRounds = None,
    turn_s: g.GridTurn = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Measure how JOB divides the cores best: over workers, threads of operations, and threads of branches.

    Each division trains for moments, in turns with all others; the one of the highest median is named, with its margin.
    """
    with exit_code():
        from polytempo.cli.bench.thread_values import grid_values  # imports the jobs' names

        asked = grid_values(job, cores, batch_size, global_batch_size, rounds, turn_s)
        from polytempo.cli.bench.tune_threads import tune_threads as command  # imports torch, which takes seconds

        command(asked, data, as_json=bool(json))
