"""Every codec on every way that takes it, and a world with ranks that exchange by one."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helpers import CLUSTER
from laws.codecs import ROWS, Row
from polytempo import compression as c
from polytempo.collectives import native
from polytempo.compression.exchange.through import through
from polytempo.core import Bundle, Codec, Port, Residual, State, Transform
from polytempo.worlds import Outcome, VirtualWorld

SIZES = (1, 2, 3, 4, 7)
STEPS = 3
EXACT_BELOW = 16
SHAPES = {"w": (11, 7), "empty": (0, 3), "bias": (5,), "long": (301,), "scalar": (), "v": (4, 3, 2)}


class Way(NamedTuple):
    """A codec on a path."""

    row: Row
    path: str
    fed: bool

    def codec(self) -> Codec:
        """The codec, with feedback where the way has it."""
        return c.feedback(self.row.make()) if self.fed else self.row.make()

    def make(self) -> Transform:
        """The transform."""
        route = {"all_reduce": native, "all_gather": c.all_gather, "reduce_scatter": c.reduce_scatter}[self.path]
        return through(self.codec(), route=route, exact_below=EXACT_BELOW)


def taken(row: Row) -> list[str]:
    """The paths that take the codec."""
    remembers = row.make().init(torch.zeros(1)) is not None
    allowed = {"all_gather": True, "all_reduce": row.summable, "reduce_scatter": row.fixed and not remembers}
    return [path for path, can in allowed.items() if can]


WAYS = [
    Way(row, path, fed) for row in ROWS for path, fed in product(taken(row), (False, True)) if row.feedable or not fed
]


def label(way: Way) -> str:
    """The codec's name in a test."""
    return f"{'feedback ' if way.fed else ''}{way.row.text} {way.path}"


def values(step: int, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A rank's values in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def shares(num_ranks: int) -> list[float]:
    """Uneven ones; the second of three or more ranks had no samples at all."""
    weights = [0 if num_ranks > 2 and rank == 1 else rank + 1 for rank in range(num_ranks)]
    return [weight / sum(weights) for weight in weights]


class Ran(NamedTuple):
    """A rank's answers, one a step, and its last state."""

    answers: list[Tensor]
    state: State


def ran(transform: Transform, num_ranks: int, dtype: torch.dtype, steps: int = STEPS) -> Outcome[Ran]:
    """`steps` exchanges among so many ranks."""
    part = shares(num_ranks)

    async def program(port: Port) -> Ran:
        answers = []
        state = transform.init(Bundle(values(0, port.rank, dtype)))
        for step in range(1, steps + 1):
            given = Bundle(values(step, port.rank, dtype), part[port.rank])
            answer, state = await transform.apply(port, given, state)
            assert answer is not None
            answers.append(answer.flat.clone())
        return Ran(answers, state)

    outcome = VirtualWorld(CLUSTER, num_ranks).run(program)
    assert outcome.unreceived == 0
    return outcome


def residuals(state: Any) -> list[Tensor]:
    """All residuals of a state."""
    if isinstance(state, Residual):
        return [] if state.residual is None else [state.residual]
    if isinstance(state, dict):
        return [each for part in state.values() for each in residuals(part)]
    return [each for part in state for each in residuals(part)] if isinstance(state, tuple) else []


def left(state: State, dtype: torch.dtype) -> Tensor:
    """A rank's residual, at its place in the flat buffer."""
    empty = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    for name, codec_state in state.codecs.items():
        for residual in residuals(codec_state):
            assert residual.shape == empty[name].shape
            empty[name] += residual
    return Bundle(empty).flat.double()


def weighted(num_ranks: int, dtype: torch.dtype, steps: int) -> Tensor:
    """Σ over steps of Σᵢ shareᵢ · xᵢ, in float64."""
    total = torch.zeros_like(Bundle(values(0, 0, torch.float64)).flat)
    for step, (rank, share) in product(range(1, steps + 1), enumerate(shares(num_ranks))):
        total += share * Bundle(values(step, rank, dtype)).flat.double()
    return total


def tolerance(way: Way, num_ranks: int, dtype: torch.dtype) -> float:
    """The tolerance of the sum over all steps. Wires of 16 bits that are added round each partial sum, and no
    residual keeps that."""
    wire = way.row.make().wire_dtype(torch.zeros(1, dtype=dtype), num_ranks)
    rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
    if way.path == "all_reduce" and wire in rounding:
        return STEPS * num_ranks * rounding[wire] * 4
    return 1e-5 if dtype is torch.float32 else 1e-12
