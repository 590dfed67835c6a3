"""The options of `polytempo tune threads`: how they are written, and their help. None means not given."""

from __future__ import annotations

from typing import Annotated

import typer

Cores = Annotated[int | None, typer.Option(metavar="N", help="Cores to divide. Default: all of this machine.")]
GridRounds = Annotated[
    int | None, typer.Option("--rounds", metavar="R", help="Rounds, in each of which every division runs. Default: 5.")
]
GridTurn = Annotated[
    float | None,
    typer.Option("--turn-s", metavar="S", help="Seconds that a division runs in a round. Default: 0.5."),
]
