"""Pairs of features in a user's loop on a device: pipelines, parts of layers, precision, norms, saving, or refused."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import polytempo as pt
from device.crew import BACKENDS, backend, check_all, first_fault, last_line, telling, together
from laws.combination_runs import distance, mesh_of, own_loop, workers_of
from laws.combinations import OWN, Combination, covering, refusal
from polytempo.core import PolytempoError
from polytempo.worlds import ProcessWorld

pytestmark = pytest.mark.process

LOOPS = telling([row for row in covering() if row.loop in OWN])
MESHES = sorted({(workers_of(row), tuple((mesh_of(row) or {}).items())) for row in LOOPS})
BROKEN_OFF_AT = 4
ONE_COPY = "PT1901"
"""The refusal of one copy of the weights, which is in the memory of the host."""
TOLERANCE = {"pretend": 0.0, "cuda": 1e-3}


@pytest.mark.parametrize("which", BACKENDS)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join([str(mesh[0]), *(f"{k}{n}" for k, n in mesh[1])]))
def test_a_loop_of_a_user(
    device: str, mesh: tuple[int, tuple[tuple[str, int], ...]], which: str, tmp_path: Path
) -> None:
    """All rows meet the group that the library chooses, and a third of them one that is named."""
    rows = [row for row in LOOPS if (workers_of(row), tuple((mesh_of(row) or {}).items())) == mesh]
    rows = rows if which == BACKENDS[0] else rows[::3]
    num_ranks, axes = mesh

    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        if axes:
            pt.init(mesh=dict(axes))
        return first_fault({str(row): partial(fault, row, world, card, tmp_path / str(row)) for row in rows})

    check_all(together(device, num_ranks, work, backend=backend(which, device, num_ranks)))


def fault(row: Combination, world: ProcessWorld, card: torch.device, folder: Path) -> str:
    """The row's error, or nothing. `folder`: of loops that are looked at."""
    words = ONE_COPY if row.layout == "one_copy" else refusal(row._asdict())
    stop = BROKEN_OFF_AT if row.saving == "resumed" else None
    try:
        there = own_loop(row, world, stop, card, folder / "there")
    except Exception as error:
        refused = isinstance(error, ValueError | PolytempoError) and re.search(words or "$^", str(error))
        return "" if refused else last_line(error)
    if words is not None:
        return "not refused"
    here = own_loop(row, world, out=folder / "here")
    found = distance({name: tensor.cpu() for name, tensor in there.items()}, here)
    return "" if found <= TOLERANCE[card.type] else f"{found:.2e} from the CPU's"
