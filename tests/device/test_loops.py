"""Every strategy under the loops of the catalogue, on a device: the CPU's parameters, and all state on the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from device.crew import BACKENDS, backend, check_all, first_fault, last_line, together
from laws.catalogue import ROWS, Row, label
from laws.loop_outcomes import ON_TWO, ran
from laws.loops import LOOPS, Loop, Trial, plain
from polytempo.worlds import ProcessWorld

pytestmark = pytest.mark.process

TOLERANCE = {"pretend": 0.0, "cuda": 1e-4}
"""Relative to the norm of the parameters; the pretend device computes as the CPU does."""

ONE_COPY = "PT1901"
"""The refusal of one copy of the weights, which is in the memory of the host."""

SETTINGS = {
    (1, BACKENDS[0]): ("sync_sgd", "top_k_sgd"),
    (2, BACKENDS[0]): ("sync_sgd", "local_sgd", "gossip", "delayed_sgd", "top_k_sgd"),
    (2, BACKENDS[1]): ("sync_sgd", "gossip"),
}
"""Ranks and their group (one rank has none): of each kind of exchange one strategy, which meets all loops. All other
strategies meet the plain order of calls."""


@pytest.mark.parametrize(("num_ranks", "which"), SETTINGS)
def test_every_strategy_ends_with_the_parameters_of_the_cpu(device: str, num_ranks: int, which: str) -> None:
    rows = ROWS if num_ranks == 1 else [row for row in ROWS if row in ON_TWO or row.name == "sync_sgd"]
    check(device, num_ranks, which, rows, [Loop(plain)])


@pytest.mark.parametrize(("num_ranks", "which"), SETTINGS)
def test_every_loop_ends_with_the_parameters_of_the_cpu(device: str, num_ranks: int, which: str) -> None:
    rows = [next(row for row in ON_TWO if row.name == name) for name in SETTINGS[num_ranks, which]]
    check(device, num_ranks, which, rows, LOOPS)


def check(device: str, num_ranks: int, which: str, rows: list[Row], loops: list[Loop]) -> None:
    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        pairs = [(row, loop) for row in rows for loop in loops]
        return first_fault({f"{label(row)} {loop.name}": partial(fault, row, loop, world, card) for row, loop in pairs})

    check_all(together(device, num_ranks, work, backend=backend(which, device, num_ranks)))


def fault(row: Row, loop: Loop, world: ProcessWorld, card: torch.device) -> str:
    """The row's error under the loop, or nothing."""
    try:
        there, here = ran(row, loop, world, card), ran(row, loop, world)
    except Exception as error:
        return last_line(error)
    if isinstance(there, str) and (ONE_COPY in there or isinstance(here, str)):
        return "" if ONE_COPY not in there or row.name in ("shared_memory", "hogwild") else there
    if isinstance(there, str) or isinstance(here, str):
        return f"refused on one of both: {there}, {here}"
    if strays := [name for name, tensor in tensors(there) if tensor.device != card]:
        return f"not on the device: {strays}"
    distance = float((there.parameters().cpu() - here.parameters()).norm() / here.parameters().norm())
    return "" if distance <= TOLERANCE[card.type] else f"{distance:.2e} from the CPU's"


def tensors(trial: Trial) -> Iterator[tuple[str, Tensor]]:
    """Parameters, gradients, buffers, and the optimizer's state but for counts."""
    yield from trial.net.state_dict().items()
    names: dict[nn.Parameter, str] = {p: name for name, p in trial.net.named_parameters()}
    yield from ((f"{name}.grad", p.grad) for p, name in names.items() if p.grad is not None)
    for parameter, state in trial.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                yield f"{names.get(parameter)} {key}", value
