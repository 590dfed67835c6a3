"""`find_rate`: a learning-rate range test of a job with a strategy, in a run of its own.

callback   step ─ losses since the last call ─▶ `RateRange` ─ the loss grows: stop
schedule   lowest · factorᵏ in step k
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any, Unpack

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from polytempo.cluster.cluster import Cluster
from polytempo.core.errors import NotFinite
from polytempo.core.strategy import Strategy
from polytempo.core.system.url_path import place
from polytempo.runs.frame.arguments import checked_job
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.callbacks.callback import Callback, CallbackFacts, Control
from polytempo.spec.job import Data, Job, OfBatch
from polytempo.spec.loss_divisor import DividedLoss, divisor_of
from polytempo.spec.run_options import OptionKeywords, RunOptions, with_keywords
from polytempo.spec.text.notebook_table import FRAME
from polytempo.training.tuning.rate_range import RateRange, growing_rates

_SPAN = 1e3
_STEPS, _FEWEST = 100, 10


@dataclass(frozen=True)
class FoundRate:
    """The result of `find_rate`."""

    suggested: float
    """The smaller one of `steepest` and a tenth of `least`."""
    steepest: float
    """The rate of the step with the largest fall of the smoothed loss."""
    least: float
    """The rate of the least smoothed loss."""
    rates: list[float]
    losses: list[float]
    """The smoothed training loss at each rate."""
    diverged: bool
    """True if the loss grew before the largest rate; otherwise a larger `highest` may show a larger rate."""
    job: str
    strategy: str
    workers: int

    def draw(self, path: str) -> None:
        """Write a PNG of the loss against the rates, with the three rates marked."""
        from polytempo.report.pictures.loss_landscape import draw_rates  # imports matplotlib, which takes seconds

        draw_rates(place(path), self.rates, self.losses, {"suggested": self.suggested, "least loss": self.least})

    def __str__(self) -> str:
        end = "then the loss grew" if self.diverged else "and the loss had not grown; try a larger highest"
        run = f"{self.job}, {self.strategy}, workers={self.workers}"
        falls = f"the loss fell fastest at {self.steepest:.3g} and was least at {self.least:.3g}"
        return f"{run}: try a rate of {self.suggested:.3g}; {falls}, {end}"

    def _repr_html_(self) -> str:
        return f'<div style="{FRAME}">{escape(str(self))}</div>'


def find_rate(
    job: Job | str,
    strategy: Strategy | str = "sync_sgd",
    workers: int = 1,
    cluster: Cluster | str | None = None,
    options: RunOptions | None = None,
    *,
    lowest: float | None = None,
    highest: float | None = None,
    **more: Unpack[OptionKeywords],
) -> FoundRate:
    """Find a learning rate: train while the rate grows by the same factor in each step, until the loss grows.

        found = pt.find_rate("digits", "local_sgd(period=8)", workers=4)
        pt.run("digits", "local_sgd(period=8)", workers=4, lr=found.suggested)

    It is a run of its own under a virtual clock, so it works for every strategy, and neither a model, an optimizer, a
    checkpoint nor torch's random numbers of this process change. `lowest` and `highest`: by default the job's rate
    divided and multiplied by 1,000. `cluster` and options are as in `simulate`: `steps` are at most so many, by
    default 100; schedules, `lr`, `epochs`, `until`, `eval_every` and callbacks that look at scores are left out, the
    job's and the given ones.

    The loss in step k is the mean of all workers' batches before their updates, smoothed with weight 0.7 and without
    bias. The test ends where that is above its least value by half, and above its first one. With few samples in a step
    noise decides: then give more workers or a larger batch.

    Cost: at most `steps` steps of all workers, one after the other in this process. Errors: ValueError for
    bounds that are not 0 < lowest < highest, fewer than 10 steps, and a loss that is not finite in the first step; and
    the refusals of `simulate`.

    Source: L. N. Smith, "Cyclical learning rates for training neural networks", 2017 (2015 as a preprint), section
    3.3, where the rate grows linearly and its bounds are read from the accuracy. Deviations: the rate grows
    exponentially, the training loss is read, and the suggestion is a rule (steepest fall, or a tenth of the least
    loss's rate), as in later practice.
    """
    made = checked_job(job)
    low = made.lr / _SPAN if lowest is None else lowest
    high = made.lr * _SPAN if highest is None else highest
    asked = with_keywords(options, more)
    steps = asked.steps or _STEPS
    if not 0 < low < high < math.inf or steps < _FEWEST:
        raise ValueError(
            f"lowest={low:g}, highest={high:g}, steps={steps}: give 0 < lowest < highest, and {_FEWEST} steps or more"
        )
    seen = _Seen(growing_rates(low, high, steps))
    data, loss = partial(_training, made), seen.watching(made.loss)
    trial = replace(made, data=data, loss=loss, schedule=seen.schedule, origin=None)
    asked = replace(asked, steps=steps, epochs=None, lr=low, schedule=None)
    callbacks = [each for each in asked.callbacks if not getattr(each, "measures", ())]
    asked = replace(asked, until={}, eval_every=None, callbacks=[*callbacks, seen])  # nothing is evaluated
    try:
        name = simulate(trial, strategy, workers, cluster, asked).strategy
    except NotFinite:
        seen.found.diverged, name = True, str(strategy)
    found = seen.found
    found.check(made.name)
    numbers = (found.suggested, found.steepest, found.least, found.rates, found.losses, found.diverged)
    return FoundRate(*numbers, job=made.name, strategy=name, workers=workers)


def _training(job: Job, folder: Any) -> Data:
    """The data without a test set: nothing is evaluated."""
    held = job.data(folder)
    return held._replace(test=None) if isinstance(held, Data) else held


class _Seen(Callback):
    """Reads the losses of a run with a growing rate."""

    def __init__(self, rates: list[float]) -> None:
        self._rates, self._losses, self._step = rates, list[float](), 0
        self._counts = False
        self.found = RateRange()

    def watching(self, loss: Any) -> Any:
        """`loss`, with this object as an observer of its values."""

        def watched(*arguments: Any) -> Any:
            value = loss(*arguments)
            if self._counts and value.numel() == 1:
                self._losses.append(float(value.detach()))
            return value

        return OfBatch(watched, loss.divisor) if isinstance(loss, OfBatch) else DividedLoss(watched, divisor_of(loss))

    def schedule(self, optimizer: Optimizer, steps_per_epoch: int) -> LambdaLR:
        """The growing rates; behind the last one the rate stays."""
        return LambdaLR(optimizer, lambda step: self._rates[min(step, len(self._rates) - 1)] / self._rates[0])

    def on_start(self, facts: CallbackFacts) -> None:
        """Count from here on: the cost of a step may have been measured before."""
        self._counts = True
        self._losses.clear()

    def on_step(self, facts: CallbackFacts) -> Control:
        """Divide the losses since the last call over the steps since then, which all computed as many."""
        first, steps = self._step, facts.step - self._step
        if steps <= 0 or not self._losses:
            return Control()
        num = len(self._losses)
        parts = [self._losses[num * k // steps : num * (k + 1) // steps] for k in range(steps)]
        self._step, self._losses = facts.step, []
        over = False
        for step, part in enumerate(parts, start=first):
            if part and step < len(self._rates) and not over:
                over = self.found.add(self._rates[step], math.fsum(part) / len(part))
        return Control(stop=over)
