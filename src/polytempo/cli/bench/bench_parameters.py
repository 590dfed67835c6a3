"""The options of `polytempo bench`: how they are written, and their help. None means not given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Ranks = Annotated[str | None, typer.Option(metavar="N,M", help="Numbers of ranks to measure. Default: 2,4.")]
Sizes = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Tensor sizes. Default: 4KiB,64KiB,1MiB,16MiB,256MiB.",
    ),
]
Operations = Annotated[
    str | None, typer.Option(metavar="A,B", help="all_reduce, broadcast, …, send_recv, barrier. Default: all.")
]
Models = Annotated[str | None, typer.Option(metavar="A,B", help="mlp, cnn, embedding, transformer. Default: all.")]
Workers = Annotated[
    int | None, typer.Option(metavar="N", help="Number of workers. Default: 2; for memory and compression, 4.")
]
Parameters = Annotated[str | None, typer.Option(metavar="P", help="Number of parameters of the model. Default: 100M.")]
Steps = Annotated[int | None, typer.Option(metavar="K", help="Steps to train. Default: 3.")]
Rounds = Annotated[
    int | None,
    typer.Option(
        metavar="R", help="Number of rounds; in each, every contender runs once. Default: 7; for training, 9."
    ),
]
Turn = Annotated[
    float | None,
    typer.Option(
        "--turn-s", metavar="S", help="Seconds that a contender runs in a round. Default: 0.1; for training, 1."
    ),
]
Quick = Annotated[bool | None, typer.Option("--quick", help="Measure roughly, in about 20 seconds.")]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The folder for the results. Default: a new one, runs/bench-….")
]
Model = Annotated[
    str | None, typer.Option(metavar="A-B-C", help="Layer sizes of a perceptron. Default: 784-2048-2048-10.")
]
Link = Annotated[
    str | None, typer.Option(metavar="V", help="Network speed of each host: 100mbit, 1gbit, … Default: 1gbit.")
]
Latency = Annotated[
    float | None,
    typer.Option("--latency-us", metavar="µS", help="Latency of the network in microseconds. Default: 50."),
]
Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="A file of `polytempo calibrate`: its network and kernels, and nothing is measured on this machine.",
    ),
]
Codecs = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Codecs to measure, such as 'bf16, feedback(top_k(ratio=0.01)), low_rank(rank=2)'. Default: all.",
    ),
]
