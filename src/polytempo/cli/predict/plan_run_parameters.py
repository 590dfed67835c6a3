"""Options of `polytempo plan JOB`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytempo.cli.options.completion import strategy_names

PlanUntil = Annotated[
    str | None,
    typer.Option("--until", metavar="M=X", help="The target, on the test set: accuracy=0.97 or loss=0.1. Needed."),
]
WorkerCounts = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="N,N",
        help="Numbers of workers. Default: 1,2,4,8,16; with a file of `polytempo calibrate` as many as measured.",
    ),
]
BatchSizes = Annotated[
    str | None,
    typer.Option(
        "--batch-sizes", metavar="B,B", help="Samples of a worker. Default: the job's, a quarter, a half and twice it."
    ),
]
PlanStrategies = Annotated[
    str | None,
    typer.Option(
        "--strategies",
        metavar="A,B",
        help="Strategies, separated by commas, in place of those that the next five options make.",
        autocompletion=strategy_names,
    ),
]
PlanCodecs = Annotated[
    str | None, typer.Option("--codecs", metavar="C,C", help="Codecs of gradients. Default: bf16,one_bit,low_rank.")
]
Periods = Annotated[
    str | None, typer.Option("--periods", metavar="H,H", help="Periods of local SGD and DiLoCo. Default: 4,16.")
]
ShardCounts = Annotated[
    str | None, typer.Option("--shards", metavar="S,S", help="Shards of a parameter server. Default: 1.")
]
StageCounts = Annotated[
    str | None, typer.Option("--stages", metavar="P,P", help="Stages of a pipeline. Default: no pipeline.")
]
PartCounts = Annotated[
    str | None, typer.Option("--parts", metavar="P,P", help="Parts of split layers. Default: no layer is split.")
]
MemoryGb = Annotated[float | None, typer.Option("--memory-gb", metavar="GB", help="The most memory of a worker.")]
Deadline = Annotated[
    float | None,
    typer.Option("--deadline-s", metavar="S", help="The most seconds. Alone: the cheapest run within them is chosen."),
]
MostMoney = Annotated[
    float | None, typer.Option("--budget", metavar="M", help="The most money: the fastest run for it is chosen.")
]
HostPrice = Annotated[
    float | None,
    typer.Option(
        "--price", metavar="M", help="Of a host for an hour. Default: host_hour in [price] of the cluster's file."
    ),
]
PlanFile = Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write a page with the picture.")]
Quote = Annotated[bool | None, typer.Option("--quote", help="Print only the commands that make the chosen runs.")]
