"""A collective run on an engine: so many processes, started together, of which each must come to its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.engines.engine import Engine, EngineProcess, Role
from polytempo.engines.failures import died, last_lines, quote
from polytempo.spec.topology import Topology

_GRACE_S = 0.3
"""How long other failures are collected after the first, to tell the cause from what it caused."""
_TICK_S = 0.2
_LONGEST_WAIT_S = 3600.0


class RunTimedOut(PolytempoError):
    """The run was not over within `timeout_s`; `ranks` were still running."""

    def __init__(self, message: str, timeout_s: float, ranks: list[int]) -> None:
        self.timeout_s, self.ranks = timeout_s, ranks
        super().__init__(message)


def collected(
    engine: Engine,
    topology: Topology,
    tick: Callable[[], object] | None = None,
    timeout_s: float | None = None,
    ask_where: Callable[[Sequence[EngineProcess]], object] = lambda processes: None,
) -> list[Any]:
    """Start the topology's ranks, wait until each has left its result, and return what they left, by rank.

    `tick` is called a few times a second meanwhile, and may raise. `ask_where` lets processes write into their logs
    where they hang. Errors: `WorkerDied` for the first that fails, `RunTimedOut` after `timeout_s`.
    """
    processes = [engine.start(Role("rank", rank, rank), topology.host_of(rank)) for rank in topology.workers]
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while running := [process for process in processes if process.exit_code is None]:
        left_s = max(0.0, deadline - time.monotonic())
        engine.poll(min(left_s, _TICK_S if tick else _LONGEST_WAIT_S))
        if any(process.failed for process in processes):
            _await_all(engine, processes)
            raise died([process for process in processes if process.failed], len(processes))
        if timeout_s is not None and time.monotonic() >= deadline:
            ask_where(running)
            _await_all(engine, processes)
            raise _timed_out([process for process in processes if process.exit_code is None], timeout_s)
        if tick:
            tick()
    return [json.loads(process.result or b"null") for process in processes]


def _await_all(engine: Engine, processes: Sequence[EngineProcess]) -> None:
    """Wait until all have ended, for a moment at most."""
    until = time.monotonic() + _GRACE_S
    while any(process.exit_code is None for process in processes) and time.monotonic() < until:
        engine.poll(max(0.0, until - time.monotonic()))


def _timed_out(running: Sequence[EngineProcess], timeout_s: float) -> RunTimedOut:
    ranks = [process.role.node for process in running]
    who = ", ".join(f"rank {rank}" for rank in ranks)
    quoted = quote(f"Where rank {ranks[0]} was", last_lines(running[0].log, "(most recent call first)"))
    return RunTimedOut(f"the run was not over within {timeout_s:g} s; still running: {who}. {quoted}", timeout_s, ranks)
