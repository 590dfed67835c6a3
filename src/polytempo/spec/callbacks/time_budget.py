"""`time_budget`: ends a run after so much training time."""

from __future__ import annotations

from math import inf

from polytempo.spec.callbacks.callback import Callback, CallbackFacts, Control


class TimeBudget(Callback):
    """See `time_budget`."""

    def __init__(self, seconds: float) -> None:
        if not 0 < seconds < inf:
            raise ValueError(f"seconds={seconds} must be a finite number above 0")
        self.seconds = float(seconds)
        self.text = f"time_budget({self.seconds!r})"

    def on_step(self, facts: CallbackFacts) -> Control:
        """Stop when the time is used up."""
        return Control(stop=facts.seconds >= self.seconds)


def time_budget(seconds: float) -> TimeBudget:
    """Stop after `seconds` of training, over all parts of a resumed run; virtual seconds in a simulation.

        pt.run(job, "sync_sgd", epochs=1000, callbacks=[pt.callbacks.time_budget(3600)])

    Evaluations and checkpoints do not count. The final model is evaluated and saved afterwards, as at any end.
    """
    return TimeBudget(seconds)
