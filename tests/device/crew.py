"""Ranks on a device: as `process.crew`, with a process group for the device's tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from laws.combinations import Combination
from polytempo.device import backend_of, num_devices
from polytempo.engines.engine import Result
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.worlds import ProcessWorld

BACKENDS = ("pt.init's own", "named")
"""A group that the library chooses, and one that a user names: the host's backend, and the device's own."""

PLACED = [("layout", "precision"), ("layout", "loop"), ("layout", "saving"), ("family", "precision")]
"""Factors of `laws.combinations` that decide together where tensors are."""


def backend(which: str, device: str, num_ranks: int) -> str | None:
    """The argument of `pt.init`. Skips where ranks share a card and the device's own group refuses that, as NCCL."""
    if which == BACKENDS[0]:
        return None
    own = backend_of(device)
    if own is None or (device != "pretend" and num_ranks > num_devices()):
        pytest.skip(f"{own} has no group of {num_ranks} ranks on {num_devices()} of {device}")
    return f"cpu:gloo,{device}:{own}"


def together(
    device: str,
    num_ranks: int,
    work: Callable[[ProcessWorld, torch.device], Result],
    *,
    backend: str | None = None,
    mesh: Mapping[str, int] | None = None,
) -> list[Any]:
    """The value of `work(world, card)` on each of `num_ranks` processes, in the order of ranks, with cards in turn."""

    def serve(rank_info: RankInfo) -> Result:
        world = init(quiet=True, mesh=mesh, backend=backend)
        card = torch.device(device, rank_info.rank % num_devices())
        torch.accelerator.set_device_index(card.index)
        return work(world, card)

    return launch(serve, num_ranks, threads=1)


def last_line(error: Exception) -> str:
    """The error, and the last line of ours that it passed through."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/polytempo/" in frame.filename]
    place = f"{ours[-1].filename.rpartition('/polytempo/')[2]}:{ours[-1].lineno}" if ours else "tests"
    return f"{type(error).__name__} at {place}: {error}"


def check_all(found: list[dict[str, str]]) -> None:
    """Fail with a line for each fault of each rank."""
    lines = [f"rank {rank} {case}: {fault}" for rank, faults in enumerate(found) for case, fault in faults.items()]
    if lines:
        pytest.fail("\n".join([f"{len(lines)} faults", *lines]), pytrace=False)


def first_fault(cases: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """The first case that has one, with its fault: after it ranks are out of step."""
    return next(({name: wrong} for name, case in cases.items() if (wrong := case())), {})


def telling(rows: Sequence[Combination]) -> list[Combination]:
    """The rows that show something of places of tensors: a value, or a pair of `PLACED`, that no row before has."""
    seen, found = set[tuple[object, ...]](), list[Combination]()
    for row in rows:
        values = row._asdict()
        facts = {*values.items(), *((a, values[a], b, values[b]) for a, b in PLACED)}
        if not facts <= seen:
            found.append(row)
        seen |= facts
    return found
