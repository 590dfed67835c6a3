"""A collective run on an engine: processes start together, and each must come to its end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.core.system.notice import Notice, Preempted
from polytempo.engines.engine import AskingWhere, Engine, EngineProcess, Preempting, Role
from polytempo.engines.processes.failures import blame, death_of, died, last_lines, quote
from polytempo.spec.topology import Topology

_GRACE_S = 0.3
"""Failures are collected for so long after the first, to tell the cause from its effects."""
_CAUSE_S = 2.0
"""The wait for a peer's end, where all that failed only lost a peer."""
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
    notice: Notice | None = None,
) -> list[Any]:
    """Start the topology's ranks, wait until each has left its result, and return the results by rank.

    `tick` is called a few times a second meanwhile, and may raise. Errors: `WorkerDied` for the first that fails,
    `RunTimedOut` after `timeout_s`, `Preempted` where ranks have saved and left, as this process asks of them when it
    has its `notice`.
    """
    processes = [engine.start(Role("rank", rank, rank), topology.host_of(rank)) for rank in topology.workers]
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    asked = False
    while running := [process for process in processes if process.exit_code is None]:
        left_s = max(0.0, deadline - time.monotonic())
        engine.poll(min(left_s, _TICK_S if tick else _LONGEST_WAIT_S))
        if notice is not None and notice.given and not asked:
            asked = True
            _pass_on(engine, notice)
        if notice is not None and notice.expired:
            notice.end()
        if any(process.failed for process in processes):
            if any(_preempted(process) for process in processes):
                raise _left(engine, processes, 30.0 if notice is None else notice.grace_s)
            if asked and notice is not None:
                notice.end()
            raise _died(engine, processes)
        if timeout_s is not None and time.monotonic() >= deadline:
            if isinstance(engine, AskingWhere):
                engine.ask_where(running)
            _await_all(engine, processes)
            raise _timed_out([process for process in processes if process.exit_code is None], timeout_s)
        if tick:
            tick()
    return [json.loads(process.result or b"null") for process in processes]


def _pass_on(engine: Engine, notice: Notice) -> None:
    """Let the run's processes save and leave; where they cannot be asked, the run ends as it would without."""
    if isinstance(engine, Preempting):
        engine.preempt()
    else:
        notice.end()


def _preempted(process: EngineProcess) -> bool:
    return process.failure is not None and process.failure.error == Preempted.__name__


def _left(engine: Engine, processes: Sequence[EngineProcess], within_s: float) -> BaseException:
    """`Preempted` if all ranks have saved and left; else the failure of another rank."""
    _await_all(engine, processes, within_s)
    others = [process for process in processes if process.failed and not _preempted(process)]
    if others:
        return died(others, len(processes))
    steps = [process.failure.facts["step"] for process in processes if process.failure and process.failure.facts]
    return Preempted(max(steps))


def _await_all(engine: Engine, processes: Sequence[EngineProcess], within_s: float = _GRACE_S) -> None:
    """Wait until all have ended, for a moment at most."""
    until = time.monotonic() + within_s
    while any(process.exit_code is None for process in processes) and time.monotonic() < until:
        engine.poll(max(0.0, until - time.monotonic()))


def _died(engine: Engine, processes: Sequence[EngineProcess]) -> PolytempoError:
    """The error of the first failure. Ranks that only waited for another one end before it may be seen to end."""
    until_s = time.monotonic() + _CAUSE_S
    _await_all(engine, processes)
    while _only_waited(processes) and _running(processes) and time.monotonic() < until_s:
        engine.poll(max(0.0, until_s - time.monotonic()))
    failed, running = [process for process in processes if process.failed], _running(processes)
    holding = None
    if _only_waited(processes) and running:
        culprit = _named(failed, running)
        if isinstance(engine, AskingWhere):
            engine.ask_where([culprit])
            _await_all(engine, processes)
        holding = culprit, "is stopped by a signal" if culprit.stopped else "hangs"
    return died(failed, len(processes), holding=holding)


def _running(processes: Sequence[EngineProcess]) -> list[EngineProcess]:
    return [process for process in processes if process.exit_code is None]


def _only_waited(processes: Sequence[EngineProcess]) -> bool:
    """True if all that failed did so because of another one."""
    return all(process.failure is not None and process.failure.symptom for process in processes if process.failed)


def _named(failed: Sequence[EngineProcess], running: Sequence[EngineProcess]) -> EngineProcess:
    """The running process that a signal holds, or that the failed ones name, or the first."""
    said = " ".join(process.failure.message for process in failed if process.failure is not None)
    named = [process for process in running if re.search(rf"\brank {process.role.node} (did not come|is lost)", said)]
    return next((process for process in running if process.stopped), (named or list(running))[0])


def _timed_out(running: Sequence[EngineProcess], timeout_s: float) -> RunTimedOut:
    ranks = [process.role.node for process in running]
    who = ", ".join(f"rank {rank}" for rank in ranks)
    quoted = quote(f"Where rank {ranks[0]} was", last_lines(running[0].log, "(most recent call first)"))
    said = f"the run was not over within {timeout_s:g} s; still running: {who}. {quoted}"
    culprit = next((process for process in running if process.stopped), running[0])
    cause = "is stopped by a signal" if culprit.stopped else f"was still running after {timeout_s:g} s"
    return blame(RunTimedOut(said, timeout_s, ranks), death_of(culprit, f"rank {culprit.role.node}", cause))
