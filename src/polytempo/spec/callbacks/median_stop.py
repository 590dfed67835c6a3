"""`median_stop`: ends a trial of a sweep that is worse than the median of the trials before it."""

from __future__ import annotations

import math
from typing import Any

from polytempo.spec.callbacks.callback import Callback, CallbackFacts, Control
from polytempo.spec.callbacks.early_stop import is_better_small, value_of


class MedianStop(Callback):
    """See `median_stop`."""

    def __init__(self, metric: str, medians: str, better: str) -> None:
        self.metric, self.measures = metric, (metric,)
        self.medians = [float(each) for each in medians.split()]
        self._sign = 1.0 if is_better_small(metric, better) else -1.0
        self.text = f"median_stop(metric={metric!r}, medians={medians!r}, better={better})"
        self.on_start(CallbackFacts(out=None))

    def on_start(self, facts: CallbackFacts) -> None:
        """Begin without evaluations; a resume brings them."""
        self.seen, self.best = 0, math.inf

    def on_evaluation(self, facts: CallbackFacts) -> Control:
        """Stop where the best value so far is worse than the median of other trials at this evaluation."""
        value = self._sign * value_of(self, self.metric, facts)
        self.best = self.best if math.isnan(value) else min(self.best, value)
        self.seen += 1
        if self.seen > len(self.medians):
            return Control()
        return Control(stop=self.best > self._sign * self.medians[self.seen - 1])

    def state_dict(self) -> dict[str, Any]:
        """The number of evaluations and the best value."""
        return {"seen": self.seen, "best": None if math.isinf(self.best) else self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.seen, self.best = int(state["seen"]), math.inf if state["best"] is None else float(state["best"])


def median_stop(metric: str = "loss", medians: str = "", better: str = "auto") -> MedianStop:
    """Stop at evaluation k where the best value so far is worse than the k-th of `medians`, numbers in one text.

        pt.run(job, "sync_sgd", callbacks=["median_stop(metric=accuracy, medians='0.5 0.7 0.8')"])

    A sweep with `prune` gives it the medians of the trials before (the median stopping rule of Golovin et al., 2017,
    "Google Vizier", section 3.2.2, with the best value in place of the running average). Evaluations beyond the last
    median stop nothing.
    """
    return MedianStop(metric, medians, better)
