"""`RunPlan`: the findings of a search: forecasts, the front, the winner, its reversal, and missing runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from polytempo.planner.forecast import RunForecast
from polytempo.planner.front import PlanLimits, Reversal
from polytempo.planner.samples_law import SamplesLaw, SamplesTrial
from polytempo.planner.search_space import LeftOut

NOT_CONSIDERED = (
    "other learning rates than the job's, at any batch (`polytempo tune batch` looks for one)",
    "the time to start processes and to read data, scores, checkpoints, and workers that fail",
    "links that others use meanwhile, and hosts of several kinds",
    "that a strategy needs more samples with many workers than with as large a batch of few",
)


class RunPlan(NamedTuple):
    """The chosen strategy, number of workers and batch, with all forecasts."""

    job: str
    cluster: str
    until: Mapping[str, float]
    limits: PlanLimits
    num_runs: int
    """The number of priced runs."""
    forecasts: list[RunForecast]
    """The fastest first, without runs of families that were given up."""
    front: list[RunForecast]
    winner: RunForecast | None
    """None if no run keeps to the limits."""
    runner_up: RunForecast | None
    """The best of another family."""
    chance: float | None
    """The chance that the winner beats the runner-up in a draw."""
    reversal: Reversal | None
    laws: Mapping[str, SamplesLaw]
    """Family -> law."""
    noise: float
    """The deviation of runs with other seeds, as a part of their samples."""
    trials: list[SamplesTrial]
    given_up: list[LeftOut]
    """Families that cannot win, or that did not reach the target."""
    left_out: list[LeftOut]
    """Runs that cannot be made or priced."""
    interrupted: bool
    took_s: float

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`."""
        limits = self.limits
        return {
            "job": self.job,
            "cluster": self.cluster,
            "until": dict(self.until),
            "limits": limits._asdict(),
            "runs": self.num_runs,
            "winner": self._plain(self.winner),
            "runner_up": self._plain(self.runner_up),
            "chance": self.chance,
            "reversal": None if self.reversal is None else self.reversal._asdict(),
            "front": [self._plain(each) for each in self.front],
            "forecasts": [self._plain(each) for each in self.forecasts],
            "laws": {name: law._asdict() for name, law in self.laws.items()},
            "noise": self.noise,
            "trials": [each._asdict() for each in self.trials],
            "given_up": [each._asdict() for each in self.given_up],
            "left_out": [each._asdict() for each in self.left_out],
            "not_considered": list(NOT_CONSIDERED),
            "interrupted": self.interrupted,
            "took_s": self.took_s,
        }

    def _plain(self, found: RunForecast | None) -> dict[str, Any] | None:
        if found is None:
            return None
        run = found.run
        return {
            "strategy": run.strategy,
            "workers": run.workers,
            "batch_size": run.batch_size,
            "global_batch_size": run.global_batch,
            "balance": run.balance,
            "hosts": found.hosts,
            "seconds": found.seconds,
            "low_s": found.low_s,
            "high_s": found.high_s,
            "money": found.money(self.limits.price_per_host_hour),
            "samples": found.samples,
            "step_s": found.price.step_s,
            "samples_per_s": found.price.samples_per_s,
            "communication_share": found.price.communication_share,
            "memory_bytes": found.memory_bytes,
        }
