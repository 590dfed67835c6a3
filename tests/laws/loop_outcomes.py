"""The outcome of every strategy under a loop of the catalogue: it keeps the loop's meaning, or refuses it as
written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from laws.catalogue import ROWS, Row, label
from laws.loops import CPU, Loop, MakeOptimizer, Trial
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import together

NOT_LINEAR = {
    "acco",
    "adasum(of=None)",
    "bf16_sgd",
    "delayed_sgd",
    "dgc",
    "int8_sgd",
    "one_bit_sgd",
    "power_sgd",
    "qsgd",
    "robust_sgd",
}
NOT_LINEAR |= {"ef21", "sign_sgd", "terngrad", "threshold_sgd", "top_k_sgd"}
NOT_LINEAR |= {"demo", "dion", "distributed_lion", "distributed_muon", "islands", "one_bit_adam", "zero_one_adam"}
ONCE = "put no_sync() around all backward passes of a step but the last"
STATEFUL = "parameter_averaging(period=3, optimizer_state=True, route=native)"
SIGNUM = "sign_sgd(feedback=False, exact_below=0, momentum=0.9)"
CLIPPED = "robust_sgd(merge=centered_clip(tau=10.0, iterations=1), momentum=0.9)"
NO_MEAN = "use parameter_averaging(optimizer_state=False)"
ONE_GRADIENT = "use an optimizer that makes a step of one gradient"
ALOUD = (
    *("acco", "delayed_sgd", "demo", "dion", "distributed_lion", "distributed_muon", "one_bit_adam", "zero_one_adam"),
    *(SIGNUM, CLIPPED),
)
"""They change a gradient on one rank, too."""
REFUSED: dict[tuple[str, int], dict[str, str]] = {
    ("accumulated_aloud", 1): dict.fromkeys(ALOUD, ONCE),
    ("accumulated_aloud", 2): dict.fromkeys(NOT_LINEAR, ONCE),
    ("closure_called_twice", 1): {"acco": ONE_GRADIENT},
    ("closure_called_twice", 2): {"acco": ONE_GRADIENT, "shared_memory": "this optimizer is Twice; use sync_sgd()"},
    ("searched", 1): {"acco": ONE_GRADIENT, STATEFUL: NO_MEAN, "des_loc": NO_MEAN},
    ("searched", 2): {
        "acco": ONE_GRADIENT,
        STATEFUL: NO_MEAN,
        "des_loc": NO_MEAN,
        "shared_memory": "this optimizer is LBFGS; use sync_sgd()",
    },
}
"""(loop, ranks) -> the refusal, by name or as spelled, and the remedy. All others keep the loop's meaning."""

BROKEN = {("swapped", "shared_memory")}
"""(loop, strategy): ranks that share one copy of the weights load others into it, one after the other. No rank can
detect that, and the documentation of `attach` warns of it."""
PARTLY = ("frozen", "sparta(share=0.3, period=1, seed=0, route=native)")
"""(loop, strategy): an element of a frozen layer rests once it has been drawn, and some are drawn late."""

NEED_THREE = ("krum", "trimmed_mean", "bulyan")
ONE_ROUTE = [row for row in ROWS if row.name != "sync_sgd" or label(row).endswith("(route=native)")]
"""A mean's route makes no difference for a loop."""
ON_TWO = [row for row in ONE_ROUTE if not any(word in label(row) for word in NEED_THREE)]
ROUNDING = {"cast": 0.02}
JOINED = 1e-5


def ran(row: Row, loop: Loop, world: ProcessWorld, device: torch.device = CPU) -> Trial | str:
    """The trial after the loop, or the refusal."""
    try:
        trial = Trial(row.make(), world, loop.make, device, scaled=loop.scaled)
    except ValueError as error:
        return str(error)
    try:
        loop.run(trial)
    except (RuntimeError, ValueError) as error:
        assert trial.handle is not None
        trial.handle.detach()
        return str(error)
    trial.end()
    return trial


def differences(row: Row, loop: Loop, world: ProcessWorld) -> list[str]:
    """The errors of a strategy under a loop."""
    if (loop.name, label(row)) == PARTLY and world.size > 1:
        return []
    refused = REFUSED.get((loop.name, world.size), {})
    remedy = refused.get(label(row), refused.get(row.name))
    trial = ran(row, loop, world)
    if isinstance(trial, str) or remedy is not None:
        right = isinstance(trial, str) and remedy is not None and remedy in trial
        return [] if right else [f"refused: {trial}" if isinstance(trial, str) else "not refused"]
    if row.name == "hogwild" and world.size > 1:
        return []  # ranks race: it has run to its end, and two runs never are the same
    if (loop.name, row.name) in BROKEN and world.size > 1:
        return []
    found = trial.parameters()
    wanted: list[tuple[str, Tensor, float]] = []
    if loop.like is not None:
        wanted.append(("the plain order", in_plain_order(row, loop.like, loop.make, world), loop.tolerance))
    if world.size == 1 and row.alone == "torch":
        wanted.append(("torch alone", by_torch(loop), 0.0))
    if world.size > 1 and row.joined:
        wanted.append(("torch on joined batches", by_torch(loop), max(JOINED, loop.tolerance)))
    wrong = []
    for name, expected, tolerance in wanted:
        distance = float((found - expected).norm() / expected.norm())
        if not distance <= max(tolerance, ROUNDING.get(loop.name, 0.0) if world.size > 1 else 0.0):
            wrong.append(f"{distance:.2e} from {name}")
    return wrong


@cache
def in_plain_order(row: Row, like: Callable[[Trial], None], make: MakeOptimizer, world: ProcessWorld) -> Tensor:
    """The parameters after it, which several loops mean."""
    return ended(Trial(row.make(), world, make), like)


def ended(trial: Trial, run: Callable[[Trial], None]) -> Tensor:
    """The trial's parameters after the loop."""
    run(trial)
    trial.end()
    return trial.parameters()


@cache
def by_torch(loop: Loop) -> Tensor:
    """The parameters after the loop without Polytempo, on whole batches."""
    return ended(Trial(None, make=loop.make), loop.run)


Wrong = dict[str, list[str]]
"""The errors, by strategy."""


def wrong_on(num_ranks: int, rows: Callable[[Loop], Sequence[Row]], loops: Sequence[Loop]) -> list[dict[str, Wrong]]:
    """The errors of the rows of each loop, by the loop's name, on each of so many ranks."""

    def wrong(loop: Loop, world: ProcessWorld) -> Wrong:
        return {label(row): found for row in rows(loop) if (found := differences(row, loop, world))}

    def work(world: ProcessWorld) -> Result:
        return {loop.name: wrong(loop, world) for loop in loops}

    return together(num_ranks, work, timeout_s=100)
