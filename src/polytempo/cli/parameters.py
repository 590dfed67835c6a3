"""The options that several commands share: their spelling and their help. None means not given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Version = Annotated[bool, typer.Option("--version", help="Print the version, and end.")]
Job = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="A job by name (digits, mnist, …), or your own: my_module:job, file.py:job."),
]
Strategy = Annotated[
    str | None,
    typer.Option(metavar="S", help="A strategy such as 'local_sgd(period=8)'; `polytempo strategies` lists them."),
]
Strategies = Annotated[
    str | None, typer.Option(metavar="A,B", help="Strategies with commas between them. Default: seven common ones.")
]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Number of workers. Default: 2.")]
Cluster = Annotated[
    str | None, typer.Option(metavar="C", help="The simulated machines, such as 'ethernet(gbit_per_s=10)'.")
]
Stragglers = Annotated[
    str | None, typer.Option(metavar="D", help="How computing times vary, such as 'lognormal(sigma=0.3)'.")
]
Meta = Annotated[bool | None, typer.Option("--meta", help="Count shapes and bytes only; compute no numbers.")]
Data = Annotated[Path | None, typer.Option(metavar="PATH", help="The job's data: a folder or a file.")]
Epochs = Annotated[float | None, typer.Option(metavar="E", help="Passes over the training data. Default: the job's.")]
Until = Annotated[str | None, typer.Option(metavar="GOAL", help="End when reached: accuracy=0.97 or loss=0.1.")]
Steps = Annotated[int | None, typer.Option(metavar="K", help="End after K steps.")]
BatchSize = Annotated[int | None, typer.Option(metavar="B", help="Samples per worker and step. Default: the job's.")]
LearningRate = Annotated[float | None, typer.Option("--lr", metavar="R", help="Learning rate. Default: the job's.")]
Seed = Annotated[int | None, typer.Option(metavar="S", help="Seed of weights, order and noise. Default: 0.")]
Threads = Annotated[int | None, typer.Option(metavar="T", help="Threads per worker. Default: the cores, shared.")]
CheckpointEvery = Annotated[int | None, typer.Option(metavar="K", help="Steps between checkpoints. Default: an epoch.")]
OnDrift = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="Where ranks that must be equal differ: stop, restore (the majority's state), ignore. Default: stop.",
    ),
]
AllowNan = Annotated[
    bool | None, typer.Option("--allow-nan", help="Go on where a loss or parameter is NaN or infinite.")
]
Timeout = Annotated[float | None, typer.Option(metavar="S", help="Longest wait for another worker. Default: 300 s.")]
Transport = Annotated[
    str | None, typer.Option(metavar="T", help="A parameter server's messages: shared (memory; default) or tcp.")
]
Restarts = Annotated[
    int | None,
    typer.Option(metavar="N", help="With a parameter server: restart killed processes so often. Default: 20."),
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder. Default: a new one under runs/.")]
Force = Annotated[bool | None, typer.Option("--force", help="Write into a folder that holds files of others, too.")]
Resume = Annotated[bool | None, typer.Option("--resume/--no-resume", help="Go on from the last checkpoint.")]
Json = Annotated[bool | None, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
DryRun = Annotated[bool | None, typer.Option("--dry-run", help="Print what would be run, and end.")]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A TOML or YAML file of these options; the command line goes first.")
]
Seeds = Annotated[int | None, typer.Option(metavar="N", help="How many seeds to run. Default: 1000.")]
First = Annotated[int | None, typer.Option(metavar="S", help="The first seed. Default: 0.")]
Processes = Annotated[int | None, typer.Option(metavar="N", help="How many processes run them. Default: the cores.")]
PlantedBug = Annotated[str | None, typer.Option("--bug", metavar="NAME", help="Plant a bug, to see it found.")]

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/digits-async_sgd.")]
Stop = Annotated[
    str | None,
    typer.Option(
        "--until",
        metavar="WHERE",
        help="Stop there and show the last pushes: step=K (every batch of the first K steps has been pushed to shard "
        "0), ticket=T (that batch has been), version=V (shard 0 has been updated V times).",
    ),
]
Inspect = Annotated[bool | None, typer.Option("--inspect", help="Show every push: who, what, how stale.")]
Shard = Annotated[int | None, typer.Option("--shard", metavar="N", help="Whose pushes are shown. Default: 0.")]
ItsJob = Annotated[
    str | None, typer.Option("--job", metavar="JOB", help="The run's job, where it cannot be found by itself.")
]

Explained = Annotated[
    str, typer.Argument(metavar="STRATEGY", help="Such as 'top_k_sgd(0.01)' or 'local_sgd(period=8, codec=int8)'.")
]
Many = Annotated[int | None, typer.Option("--workers", metavar="N", help="Number of workers. Default: 8.")]
OfJob = Annotated[str | None, typer.Option("--job", metavar="JOB", help="Whose model is sent. Default: digits.")]
OfSize = Annotated[
    str | None, typer.Option("--parameters", metavar="P", help="A perceptron of so many instead: 6e6, 250k, 25M.")
]
