"""The parts of a step and the exchanges in rank 0's rows, while a run goes on."""

from __future__ import annotations

from polytempo.diagnosis.bound import PARTS, facts_of
from polytempo.diagnosis.pace import RankTimes
from polytempo.report.status.records import ExchangedOp, ExchangeRow
from polytempo.training.step.pace_watch import PaceWatch
from polytempo.training.step.replica import Replica
from polytempo.worlds.trace import OpTotals


def parts_of(replica: Replica, resumed_at: int | None, off_s: float, off_bytes: int) -> dict[str, float]:
    """`step_parts` of a replica, since its run began or was resumed."""
    began_at = resumed_at or 0
    return step_parts(replica.pace, replica.step, began_at=began_at, off_s=off_s, off_bytes=off_bytes)


def step_parts(pace: PaceWatch | None, step: int, *, began_at: int, off_s: float, off_bytes: int) -> dict[str, float]:
    """The entries `PARTS` of a row: seconds, bytes and messages of a step, the mean since the step `began_at`.

    `off_s`, `off_bytes`: seconds and bytes of scores and checkpoints. Empty on other ranks, and until ranks were
    compared. Cost: microseconds a rank.
    """
    latest = {} if pace is None else pace.latest
    if pace is None or not latest:
        return {}
    ranks = [RankTimes(each.now_s, each.busy_s, each.waited_s, each.read_s) for each in latest.values()]
    seconds, compared = max(each.seconds for each in ranks), min(each.step for each in latest.values())
    exchanged = pace.exchanged().values()
    taken = max(1, step - began_at)
    facts = facts_of(
        *(ranks, compared - began_at, ""),
        trained_s=seconds - off_s,
        workers=len(ranks),
        messages=sum(each.number for each in exchanged) / taken,
        sent_bytes=(sum(each.sent_bytes for each in exchanged) - off_bytes) / taken,
    )
    return {} if facts is None else {name: _short(getattr(facts, name)) for name in PARTS}


class RowExchanges:
    """The exchanges between two rows of rank 0. Cost: microseconds a row."""

    def __init__(self) -> None:
        self._step, self._waited_s = 0, 0.0
        self._totals: dict[str, OpTotals] = {}

    def since_last(self, pace: PaceWatch | None, step: int, began_at: int) -> ExchangeRow | None:
        """The exchanges since the last call, or since the step `began_at`; None where there were none."""
        now = {} if pace is None else dict(pace.exchanged())
        waited_s = 0.0 if pace is None else pace.times.waited_s
        none = OpTotals(0, 0, 0.0)
        ops = {op: _between(self._totals.get(op, none), each) for op, each in now.items()}
        since_step, since_s = max(self._step, began_at), self._waited_s
        self._totals, self._step, self._waited_s = now, step, waited_s
        ops = {op: each for op, each in ops.items() if each.count > 0}
        if not ops:
            return None
        return ExchangeRow(step=step, since_step=since_step, waited_s=_short(max(0.0, waited_s - since_s)), ops=ops)


def _between(before: OpTotals, now: OpTotals) -> ExchangedOp:
    return ExchangedOp(
        now.number - before.number, now.sent_bytes - before.sent_bytes, _short(now.seconds - before.seconds)
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")
