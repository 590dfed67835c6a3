"""The parts of a step in rank 0's rows, while a run goes on."""

from __future__ import annotations

from polytempo.diagnosis.bound import PARTS, facts_of
from polytempo.diagnosis.pace import RankTimes
from polytempo.report.status.row_exchanges import RankTotals
from polytempo.training.step.pace_watch import PaceWatch
from polytempo.training.step.replica import Replica


def parts_of(
    replica: Replica, now: RankTotals, resumed_at: int | None, off_s: float, off_bytes: int
) -> dict[str, float]:
    """`step_parts` of a replica, since its run began or was resumed."""
    began_at = resumed_at or 0
    return step_parts(replica.pace, now, replica.step, began_at=began_at, off_s=off_s, off_bytes=off_bytes)


def step_parts(
    pace: PaceWatch | None, now: RankTotals, step: int, *, began_at: int, off_s: float, off_bytes: int
) -> dict[str, float]:
    """The entries `PARTS` of a row: seconds, bytes and messages of a step, the mean since the step `began_at`.

    `off_s`, `off_bytes`: seconds and bytes of scores and checkpoints. Empty on other ranks, and until ranks were
    compared. Cost: microseconds a rank.
    """
    latest = {} if pace is None else pace.latest
    if pace is None or not latest:
        return {}
    ranks = [RankTimes(each.now_s, each.busy_s, each.waited_s, each.read_s) for each in latest.values()]
    seconds, compared = max(each.seconds for each in ranks), min(each.step for each in latest.values())
    exchanged = now.ops.values()
    taken = max(1, step - began_at)
    facts = facts_of(
        *(ranks, compared - began_at, ""),
        trained_s=seconds - off_s,
        workers=len(ranks),
        messages=sum(each.number for each in exchanged) / taken,
        sent_bytes=(sum(each.sent_bytes for each in exchanged) - off_bytes) / taken,
    )
    return {} if facts is None else {name: _short(getattr(facts, name)) for name in PARTS}


def _short(value: float) -> float:
    return float(f"{value:.4g}")
