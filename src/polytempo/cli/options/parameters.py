"""The options of commands that run no job: how they are written, and their help. None means not given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytempo.cli.options.command_line import shared
from polytempo.cli.options.completion import (
    cluster_names,
    cut_goals,
    engine_names,
    job_names,
    program_names,
    strategy_names,
)

MOST_CALIBRATED = 64
"""Processes that measure together."""

Version = Annotated[bool, typer.Option("--version", help="Print the version and exit.")]
Strategy = Annotated[str | None, shared("strategy")]
Workers = Annotated[int | None, shared("workers")]
Cluster = Annotated[str | None, shared("cluster")]
Stragglers = Annotated[str | None, shared("stragglers")]
Data = Annotated[Path | None, shared("data")]
BatchSize = Annotated[int | None, shared("batch_size")]
GlobalBatchSize = Annotated[int | None, shared("global_batch_size")]
Seed = Annotated[int | None, shared("seed")]
Threads = Annotated[int | None, shared("threads")]
Timeout = Annotated[float | None, shared("timeout_s")]
Json = Annotated[bool | None, shared("json")]
Seeds = Annotated[int | None, typer.Option(metavar="N", help="Number of seeds to run. Default: 1000.")]
First = Annotated[int | None, typer.Option(metavar="S", help="The first seed. Default: 0.")]
Processes = Annotated[int | None, typer.Option(metavar="N", help="Number of processes. Default: the number of cores.")]
PlantedBug = Annotated[
    str | None, typer.Option("--bug", metavar="NAME", help="Put this known bug into the code; the checks must find it.")
]

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/digits-async_sgd.")]
Stop = Annotated[
    str | None,
    typer.Option(
        "--until",
        metavar="WHERE",
        help="Stop early and show the last pushes: step=K (all batches of the first K steps are pushed to shard 0), "
        "ticket=T (batch number T is), or version=V (shard 0 has made V updates).",
    ),
]
Inspect = Annotated[bool | None, typer.Option("--inspect", help="Show every push: worker, step, staleness, verdict.")]
Shard = Annotated[int | None, typer.Option("--shard", metavar="N", help="The shard whose pushes to show. Default: 0.")]
ValidatedOn = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="C",
        help="What to simulate the run on: a file of `polytempo calibrate`. Default: cluster.toml.",
        autocompletion=cluster_names,
    ),
]
ProfiledOn = Annotated[
    str | None,
    typer.Option("--cluster", metavar="FILE", help="A file of `polytempo calibrate`, to predict the times."),
]
ValidatedJob = Annotated[
    str | None,
    typer.Option(
        "--job", metavar="JOB", help="The run's job, where it is not one that ships.", autocompletion=job_names
    ),
]
ItsJob = Annotated[
    str | None, typer.Option("--job", metavar="JOB", help="The run's job, if the record does not name it.")
]

Watched = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, as --out names it.")]
Once = Annotated[bool | None, typer.Option("--once", help="Show the run as it is now, and end.")]
EveryS = Annotated[
    float | None,
    typer.Option("--every-s", metavar="T", min=0.1, max=3600, help="Seconds between two looks. Default: 1."),
]

Measuring = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="E", help="Whose hosts to measure, such as ssh:n1,n2.", autocompletion=engine_names
    ),
]
Probes = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Processes that measure. Default: one a host, or 2."),
]
ClusterFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Where the cluster is written. Default: measured.toml.")
]
Calibrating = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="E", help="Whose hosts to measure. Default: local, this one.", autocompletion=engine_names
    ),
]
CalibratingWorkers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        max=MOST_CALIBRATED,
        help="Processes that measure together, as many a host as it will have workers. Default: one a host, or 2.",
    ),
]
CalibratedJob = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="JOB",
        help="Measure this job's own steps, too: one that ships, my_module:job or path/to/file.py:job.",
        autocompletion=job_names,
    ),
]
CalibratedFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Where the cluster is written. Default: cluster.toml.")
]

Explained = Annotated[
    str,
    typer.Argument(
        metavar="STRATEGY",
        help="Such as 'top_k_sgd(0.01)' or 'local_sgd(period=8, codec=int8)'.",
        autocompletion=strategy_names,
    ),
]
Many = Annotated[int | None, typer.Option("--workers", metavar="N", help="Number of workers. Default: 8.")]
OfJob = Annotated[
    str | None,
    typer.Option("--job", metavar="JOB", help="The job with the model. Default: digits.", autocompletion=job_names),
]
OfSize = Annotated[
    str | None,
    typer.Option("--parameters", metavar="P", help="Use a perceptron with P parameters instead: 6e6, 250k, 25M."),
]
ExplainedOn = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="C",
        help="Say also how long a step takes there: a file of `polytempo calibrate`, or 'ethernet(gbit_per_s=10)'.",
        autocompletion=cluster_names,
    ),
]
CutJob = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job that ships (digits, mnist, …), or your own: my_module:job, path/to/file.py:job.",
        autocompletion=job_names,
    ),
]
Stages = Annotated[int | None, typer.Option(metavar="K", help="Number of stages. Default: 2, or what --by names.")]
CutBy = Annotated[
    str | None,
    typer.Option(
        metavar="GOAL",
        help=(
            "What is the least: operations or memory of the largest stage, its measured time, or traffic; or the names "
            "of the layers that begin stages, with commas. Default: operations."
        ),
        autocompletion=cut_goals,
    ),
]
ActivationCodec = Annotated[
    str | None,
    typer.Option("--activations", metavar="CODEC", help="Codec by which tensors pass between stages, such as int8."),
]
GradientCodec = Annotated[
    str | None,
    typer.Option("--gradients", metavar="CODEC", help="Codec by which their gradients come back, such as bf16."),
]
LinkSpeed = Annotated[
    float | None,
    typer.Option("--gbit-per-s", metavar="G", help="Of the links between stages. Default: messages take no time."),
]
MicroBatch = Annotated[
    int | None, typer.Option("--batch-size", metavar="B", help="Samples of a micro-batch. Default: the job's batch.")
]
ScheduledCall = Annotated[
    str,
    typer.Argument(
        metavar="PROGRAM",
        help="lasso, logistic, factorization or lda, with arguments if wanted: 'lasso(l1=0.02, cut=columns)'.",
        autocompletion=program_names,
    ),
]
ScheduledData = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="CALL",
        help="What it learns from: synthetic data such as 'correlated(rows=500)', or a file, such as "
        "'table(\"housing.csv\", target=price)'. Default: small synthetic data.",
    ),
]
Sweeps = Annotated[int | None, typer.Option(metavar="K", help="Stop after K sweeps over all parameters. Default: 100.")]
Tolerance = Annotated[
    float | None, typer.Option(metavar="T", help="Stop where the program's error is at most T. Default: 1e-6.")
]
ScheduledCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="C",
        help="Simulate the workers on these machines, such as 'ethernet(gbit_per_s=10)'. Default: real processes.",
        autocompletion=cluster_names,
    ),
]
StragglerSeed = Annotated[
    int | None, typer.Option("--seed", metavar="S", help="Seed of the stragglers; programs and data have their own.")
]
Submitted = Annotated[
    list[str], typer.Argument(metavar="train …", help="The command that the job runs, with all of its options.")
]
Sbatch = Annotated[
    str | None, typer.Option(metavar="WORDS", help="More options of sbatch, such as '--account=physics'.")
]
Grace = Annotated[
    int | None, typer.Option(metavar="S", help="Seconds before the time is over in which the run saves. Default: 60.")
]
ScriptOnly = Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and submit nothing.")]
