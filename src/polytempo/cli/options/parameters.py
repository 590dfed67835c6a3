"""The options that several commands share: how they are written, and their help. None means not given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytempo.cli.options.completion import (
    cluster_names,
    cut_goals,
    distribution_names,
    engine_names,
    job_names,
    program_names,
    strategy_names,
)

MOST_CALIBRATED = 64
"""Processes that measure together."""

Version = Annotated[bool, typer.Option("--version", help="Print the version and exit.")]
Job = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help="A job that ships (digits, mnist, …), or your own: my_module:job, path/to/file.py:job.",
        autocompletion=job_names,
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="S",
        help="A strategy such as 'local_sgd(period=8)'; `polytempo strategies` lists them. Default: sync_sgd.",
        autocompletion=strategy_names,
    ),
]
Strategies = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Strategies, separated by commas. Default: seven common ones.",
        autocompletion=strategy_names,
    ),
]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Number of workers. Default: 2.")]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="E[:ADDRESS]",
        help="Who starts the workers, and where: local, subprocess, ssh:host1,host2, …. Default: local.",
        autocompletion=engine_names,
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="C",
        help="The machines to simulate, such as 'ethernet(gbit_per_s=10)'.",
        autocompletion=cluster_names,
    ),
]
Stragglers = Annotated[
    str | None,
    typer.Option(
        metavar="D",
        help="The distribution of computing times, such as 'lognormal(sigma=0.3)'; 'busy': what calibrate measured "
        "while other programs computed. Default: that of the cluster's file, or all equal.",
        autocompletion=distribution_names,
    ),
]
Meta = Annotated[
    bool | None, typer.Option("--meta", help="Simulate times and bytes only; compute no gradients. Needs --steps.")
]
Batched = Annotated[
    bool | None, typer.Option("--batched", help="Compute all workers' gradients in one pass; equal up to rounding.")
]
Data = Annotated[Path | None, typer.Option(metavar="PATH", help="The folder or file with the job's data.")]
Epochs = Annotated[float | None, typer.Option(metavar="E", help="Passes over the training data. Default: the job's.")]
Until = Annotated[
    str | None, typer.Option(metavar="GOAL", help="Stop at a test score: accuracy=0.97, loss=0.1, or both.")
]
Steps = Annotated[int | None, typer.Option(metavar="K", help="Stop after K steps.")]
BatchSize = Annotated[int | None, typer.Option(metavar="B", help="Samples per worker and step. Default: the job's.")]
GlobalBatchSize = Annotated[
    int | None, typer.Option(metavar="B", help="Samples per step of all workers together, in place of --batch-size.")
]
LearningRate = Annotated[float | None, typer.Option("--lr", metavar="R", help="Learning rate. Default: the job's.")]
Seed = Annotated[
    int | None, typer.Option(metavar="S", help="Seed of initial weights, sample order and random numbers. Default: 0.")
]
Threads = Annotated[
    int | None, typer.Option(metavar="T", help="Threads per worker. Default: the cores, divided among the workers.")
]
InterThreads = Annotated[
    int | None,
    typer.Option(metavar="T", help="Threads for independent branches of the model, each with --threads. Default: 1."),
]
CheckpointEvery = Annotated[
    int | None, typer.Option(metavar="K", help="Save a checkpoint every K steps. Default: every epoch.")
]
MovingAverage = Annotated[
    float | None,
    typer.Option("--ema", metavar="D", help="Score a moving average of the weights with decay D, such as 0.9999."),
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Compute with 16-bit parameters that have float32 masters: bf16, or 'fp16(loss_scale=dynamic)'.",
    ),
]
OnDrift = Annotated[
    str | None,
    typer.Option(
        metavar="ACTION",
        help="If models that must be equal differ between ranks: stop the run, restore the majority's state, or ignore "
        "it. Default: stop.",
    ),
]
NoiseScale = Annotated[
    int | None, typer.Option(metavar="K", help="Measure the gradient noise scale every K steps, such as 32.")
]
BatchGrowth = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="Let the global batch grow: by 4 after 5 epochs and by 2 after 10 with 5:4,10:2; by its gradients' noise "
        "with 'norm_test(theta=0.5)'.",
    ),
]
AllowNan = Annotated[
    bool | None, typer.Option("--allow-nan", help="Continue if a loss or a parameter is NaN or infinite.")
]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Longest wait for another worker. Default: 300 s.")
]
Transport = Annotated[
    str | None,
    typer.Option(
        metavar="T", help="With a parameter server: send messages through shared memory or tcp. Default: shared."
    ),
]
Restarts = Annotated[
    int | None,
    typer.Option(metavar="N", help="How many killed processes to replace, where a run goes on. Default: 20."),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Go on while at least N workers are left, and replace those that are lost. Default: stop."
    ),
]
MaxWorkers = Annotated[
    int | None,
    typer.Option(metavar="N", help="The most workers that a run may grow to while it goes on. Default: --workers."),
]
Scaling = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Where the number of workers changes, keep the global batch, or the local one. Default: global.",
    ),
]
Available = Annotated[
    Path | None,
    typer.Option(
        metavar="PROGRAM", help="A program that prints how many workers there may be now; it is run every 2 s."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The folder for the results, or its URL, such as s3://bucket/run. Default: a new one under runs/.",
    ),
]
LeaveGrace = Annotated[
    float | None,
    typer.Option(metavar="S", help="Seconds in which a run may save and leave after SIGTERM. Default: 30."),
]
Force = Annotated[bool | None, typer.Option("--force", help="Accept an --out folder that holds other files.")]
Resume = Annotated[bool | None, typer.Option("--resume/--no-resume", help="Continue from the last checkpoint.")]
Json = Annotated[bool | None, typer.Option("--json", help="Print only the result, as JSON.")]
DryRun = Annotated[bool | None, typer.Option("--dry-run", help="Print the settings of the run and exit.")]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A TOML or YAML file with these options; the command line overrides it."),
]
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
