"""`polytempo sharpness`: its options. The command imports its code when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from polytempo.cli.options import parameters as p
from polytempo.cli.options.failure import exit_code
from polytempo.cli.options.request import SharpnessRequest, sharpness_request

Epsilon = Annotated[float | None, typer.Option(metavar="E", help="The box of Keskar's measure. Default: 0.001.")]
Subspace = Annotated[
    int | None, typer.Option(metavar="P", help="Measure it in a random subspace of so many dimensions, too.")
]
Rho = Annotated[float | None, typer.Option(metavar="R", help="The radius of SAM's neighbourhood. Default: 0.05.")]
Samples = Annotated[
    int | None, typer.Option(metavar="N", help="Measure on so many training samples, drawn from --seed. Default: all.")
]
Line = Annotated[
    str | None, typer.Option(metavar="RUN2", help="Draw the loss along the line to the checkpoint of another run.")
]
Surface = Annotated[bool | None, typer.Option("--surface", help="Draw the loss in a plane of two random directions.")]
Points = Annotated[int | None, typer.Option(metavar="N", help="Points along each axis of a picture. Default: 25.")]
Width = Annotated[
    float | None, typer.Option(metavar="W", help="How far a surface goes in each direction. Default: 1 (a filter).")
]
Pictures = Annotated[str | None, typer.Option("--out", metavar="DIR", help="Where pictures go. Default: RUN.")]
DrawnFrom = Annotated[
    int | None, typer.Option("--seed", metavar="S", help="Seed of samples, directions and starts. Default: 0.")
]


def sharpness(
    run: p.Watched,
    epsilon: Epsilon = None,
    subspace: Subspace = None,
    rho: Rho = None,
    samples: Samples = None,
    line: Line = None,
    surface: Surface = None,
    points: Points = None,
    width: Width = None,
    seed: DrawnFrom = None,
    job: p.ItsJob = None,
    data: p.Data = None,
    threads: p.Threads = None,
    out: Pictures = None,
    json: p.Json = None,
) -> None:
    """Measure how sharp the minimum of a run is.

    Prints, for the newest checkpoint, Keskar's sharpness, the loss in SAM's neighbourhood and the largest eigenvalue of
    the Hessian, all of the training loss with dropout off and batch norms by their saved statistics. RUN may also be
    the folder of one checkpoint.
    """
    with exit_code():
        asked = sharpness_request(
            SharpnessRequest(run, job, epsilon, subspace, rho, samples, seed, line, bool(surface), points, width, out)
        )
        from polytempo.cli.look.sharpness import sharpness as command  # imports torch, which takes seconds

        command(asked, data, threads, as_json=bool(json))
