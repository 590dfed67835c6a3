"""`RowExchanges`: the exchanges of one rank between two rows, by the totals of its trace.

trace of the rank ──▶ RankTotals ──▶ since_last ──▶ ExchangeRow, behind the row
(job, server's worker, elastic member, loop of one's own)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from polytempo.report.status.records import ExchangedOp, ExchangeRow
from polytempo.worlds.trace import OpTotals, Trace


class TracedRank(Protocol):
    """The world of one rank, on processes or in mail."""

    rank: int
    trace: Trace
    waited_s: float


class RankTotals(NamedTuple):
    """The exchanges of a rank so far."""

    ops: Mapping[str, OpTotals] = MappingProxyType({})
    """Totals by operation, as the trace names them."""
    waited_s: float = 0.0
    """Seconds of waiting for others."""


def totals_of(world: TracedRank | None) -> RankTotals:
    """The totals of the rank of `world`; none without one."""
    return RankTotals() if world is None else RankTotals(world.trace.exchanged(world.rank), world.waited_s)


class RowExchanges:
    """The exchanges between two rows. `worker`: with a parameter server. Cost: microseconds a row."""

    def __init__(self, worker: int | None = None) -> None:
        self._worker, self._step = worker, 0
        self._before = RankTotals()

    def begin(self, step: int, before: RankTotals | None = None) -> None:
        """Count from `step` on, and nothing that is in `before`."""
        self._step, self._before = step, before or self._before

    def since_last(self, step: int, now: RankTotals) -> ExchangeRow | None:
        """The exchanges since the last call; None where there were none."""
        before, since_step = self._before, self._step
        self._before, self._step = now, step
        none = OpTotals(0, 0, 0.0)
        ops = {op: _between(before.ops.get(op, none), each) for op, each in now.ops.items()}
        ops = {op: each for op, each in ops.items() if each.count > 0}
        if not ops:
            return None
        waited_s = _short(max(0.0, now.waited_s - before.waited_s))
        return ExchangeRow(step=step, since_step=since_step, waited_s=waited_s, ops=ops, worker=self._worker)


def _between(before: OpTotals, now: OpTotals) -> ExchangedOp:
    return ExchangedOp(
        now.number - before.number, now.sent_bytes - before.sent_bytes, _short(now.seconds - before.seconds)
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")
