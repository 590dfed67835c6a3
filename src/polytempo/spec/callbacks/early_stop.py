"""`early_stop`: ends a run that no longer gets better."""

from __future__ import annotations

import math
from typing import Any

from polytempo.spec.callbacks.callback import Callback, CallbackFacts, Control


def is_better_small(metric: str, better: str) -> bool:
    """True if smaller values of the metric are better. ValueError unless `better` is less, more or auto."""
    if better not in ("auto", "less", "more"):
        raise ValueError(f"better={better} must be less, more or auto (less for a loss, more for others)")
    return "loss" in metric if better == "auto" else better == "less"


def value_of(callback: Callback, metric: str, facts: CallbackFacts) -> float:
    """The metric of an evaluation, None as NaN. ValueError where the run has no such metric."""
    if metric not in facts.values:
        raise ValueError(
            f"{callback}: an evaluation has no {metric}; it has {', '.join(facts.values)}, and a job's metrics by name"
        )
    value = facts.values[metric]
    return math.nan if value is None else float(value)


class EarlyStop(Callback):
    """See `early_stop`."""

    def __init__(self, metric: str, patience: int, min_change: float, better: str) -> None:
        if patience < 1 or not min_change >= 0:
            raise ValueError(f"patience={patience} must be at least 1, and min_change={min_change} at least 0")
        self.metric, self.patience, self.min_change = metric, patience, float(min_change)
        self.measures = (metric,)
        self._sign = 1.0 if is_better_small(metric, better) else -1.0
        self.text = (
            f"early_stop(metric={metric!r}, patience={patience}, min_change={self.min_change!r}, better={better})"
        )
        self._begin()

    def _begin(self) -> None:
        self.best: float | None = None
        """The best value so far, and the step of its evaluation."""
        self.best_step = 0
        self.waited = 0
        """Evaluations since then."""

    def on_start(self, facts: CallbackFacts) -> None:
        """Begin without a best value; a resume brings it."""
        self._begin()

    def on_evaluation(self, facts: CallbackFacts) -> Control:
        """Stop after `patience` evaluations without a better value."""
        value = value_of(self, self.metric, facts)
        if not math.isnan(value) and (self.best is None or self._sign * (self.best - value) > self.min_change):
            self.best, self.best_step, self.waited = value, facts.step, 0
            return Control()
        self.waited += 1
        return Control(stop=self.waited >= self.patience)

    def state_dict(self) -> dict[str, Any]:
        """The best value and the evaluations since then."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.best, self.best_step, self.waited = state["best"], int(state["best_step"]), int(state["waited"])


def early_stop(metric: str = "loss", patience: int = 3, min_change: float = 0.0, better: str = "auto") -> EarlyStop:
    """Stop after `patience` evaluations in a row without a better value of `metric`.

        pt.run(job, "local_sgd(period=8)", epochs=100, callbacks=[pt.callbacks.early_stop("accuracy", patience=5)])

    A value is better if it is by more than `min_change` below the best one so far, or above it with `better="more"`;
    "auto" takes less for names with "loss", and more for others. NaN is not better. `metric`: loss, accuracy, or one
    of the job's metrics.

    Errors: ValueError for a `patience` below 1, a negative `min_change`, and before the run for a metric that the job's
    scores lack; in a loop of your own JobFailed for that, at the first evaluation.
    """
    return EarlyStop(metric, patience, min_change, better)
