"""The bound of a run, from the totals of its ranks: `Result.bound`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refusal_of
from polytempo.diagnosis.bound import MEMORY, NETWORK, UsedLink, bound, facts_of
from polytempo.diagnosis.pace import RankTimes
from polytempo.spec.run_spec import balance_features
from polytempo.training.job.context import TrainingContext, TrainingSummary


def _by_speed(strategy: Strategy) -> set[str]:
    return {*strategy.features, *balance_features(strategy, "speed")}


def bound_of(
    context: TrainingContext,
    summary: TrainingSummary,
    ranks: Sequence[RankTimes],
    *,
    messages: float,
    sent_bytes: float,
    hosts: int,
    link: UsedLink | None = None,
    virtual: bool = False,
) -> dict[str, Any] | None:
    """`Result.bound` of a run, by the totals of its ranks since it began or was resumed."""
    steps = summary.steps - (context.resumed_at or 0)
    noise, pace = context.replica.noise, context.replica.pace
    facts = facts_of(
        ranks,
        steps,
        str(context.replica.strategy),
        trained_s=max((each.seconds for each in ranks), default=0.0) - context.observer.off_s,
        workers=len(ranks),
        sent_bytes=sent_bytes / max(1, steps),
        messages=messages / max(1, steps),
        link=link or (NETWORK if hosts > 1 else MEMORY),
        batch_size=context.spec.batch_size,
        noise_scale=None if noise is None else noise.row.get("noise_scale"),
        stages=context.spec.strategy.stages,
        slow=pace.told[-1]["who"].replace("-", " ") if pace is not None and pace.told else "",
        virtual=virtual,
        balances=context.balance is None and not refusal_of(_by_speed(context.spec.strategy)),
    )
    found = None if facts is None else bound(facts)
    return None if found is None else found.as_json()
