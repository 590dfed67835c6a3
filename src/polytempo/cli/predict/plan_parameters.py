"""Options of `polytempo plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytempo.cli.options.completion import plan_goals, reduction_names

PlanWorkers = Annotated[int | None, typer.Option("--workers", metavar="N", help="Number of workers. Default: 32.")]
PlanLink = Annotated[
    str | None, typer.Option("--link", metavar="RATE", help="Each worker's link, such as 1gbit. Default: 10gbit.")
]
PlanCluster = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="A file of `polytempo calibrate`: its network for the links."),
]
LatencyUs = Annotated[
    float | None, typer.Option(metavar="US", help="Microseconds from process to process. Default: 50.")
]
SplitParts = Annotated[
    int | None, typer.Option("--parts", metavar="N", help="Workers that hold one model together. Default: 2.")
]
Gflops = Annotated[
    float | None, typer.Option(metavar="G", help="Gflop/s of a worker, to compare with. Default: 10, as simulated.")
]
LayerActivationCodec = Annotated[
    str | None,
    typer.Option("--activations", metavar="CODEC", help="Codec by which layers exchange activations, such as int8."),
]
PlanReduction = Annotated[
    str | None,
    typer.Option(
        "--reduction",
        metavar="WAY",
        help="How gradients are summed: ring, halving_doubling, tree, or server. Default: ring.",
        autocompletion=reduction_names,
    ),
]
PlanShards = Annotated[
    int | None, typer.Option("--shards", metavar="S", help="Shards of the parameter server. Default: 1.")
]
PlanBy = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="GOAL",
        help="What is compared: bytes (|D| with |W|), or seconds of the cost model. Default: bytes.",
        autocompletion=plan_goals,
    ),
]
