"""The options of `polytempo bench`: their spelling and their help. None means not given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Ranks = Annotated[str | None, typer.Option(metavar="N,M", help="Numbers of ranks. Default: 2,4.")]
Sizes = Annotated[
    str | None, typer.Option(metavar="A,B", help="Sizes of the larger tensor. Default: 4KiB,64KiB,1MiB,16MiB,256MiB.")
]
Operations = Annotated[
    str | None, typer.Option(metavar="A,B", help="all_reduce, broadcast, …, send_recv, barrier. Default: all.")
]
Models = Annotated[str | None, typer.Option(metavar="A,B", help="mlp, cnn, embedding, transformer. Default: all.")]
Workers = Annotated[
    int | None, typer.Option(metavar="N", help="Number of workers. Default: 2; for memory and compression, 4.")
]
Parameters = Annotated[str | None, typer.Option(metavar="P", help="Parameters of the model. Default: 100M.")]
Steps = Annotated[int | None, typer.Option(metavar="K", help="Steps to train. Default: 3.")]
Rounds = Annotated[
    int | None, typer.Option(metavar="R", help="How often everybody has a turn. Default: 7; for training, 9.")
]
Turn = Annotated[
    float | None, typer.Option("--turn-s", metavar="S", help="Seconds a turn. Default: 0.1; for training, 1.")
]
Quick = Annotated[bool | None, typer.Option("--quick", help="A rough look, in about 20 seconds.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Where files go. Default: runs/bench-….")]
Model = Annotated[str | None, typer.Option(metavar="A-B-C", help="A perceptron's layers. Default: 784-2048-2048-10.")]
Link = Annotated[str | None, typer.Option(metavar="V", help="Each host's link: 100mbit, 1gbit, … Default: 1gbit.")]
Latency = Annotated[
    float | None, typer.Option("--latency-us", metavar="µS", help="Until a message's first byte arrives. Default: 50.")
]
Codecs = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Such as 'bf16, feedback(top_k(ratio=0.01)), low_rank(rank=2)'. Default: all."),
]
