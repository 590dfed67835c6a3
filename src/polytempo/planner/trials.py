"""Short runs with real gradients under the virtual clock: how many samples a strategy needs to the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polytempo.cluster import Cluster
from polytempo.core import PolytempoError
from polytempo.core.errors import JobFailed
from polytempo.data.shard import DataShard
from polytempo.planner.samples_law import SamplesTrial
from polytempo.planner.search_space import PlannedRun
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of
from polytempo.spec.options import RunOptions
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.job.program import STEPS_BETWEEN_SCORES, check_length


class Trials:
    """Those of one job, cluster and target."""

    def __init__(self, job: Job, data: Path | None, cluster: Cluster, until: Mapping[str, float], seed: int) -> None:
        held = data_of(job, data)
        _check_target(job, held.test is not None, until)
        self.job, self._cluster, self._until, self._seed = job, cluster, until, seed
        self.num_samples = check_length(DataShard(held.training(), rank=0, size=1, batch_size=1))

    def run(self, family: str, workers: int, batch_size: int, number: int, most_samples: float) -> SamplesTrial:
        """Train until the target, or for `most_samples` at most; `number` is that of the seed.

        A run that fails has not reached it, and `failed` says why. Errors: JobFailed of the job's own functions.
        """
        strategy, seed = parse_strategy(family), self._seed + number
        global_batch = workers // strategy.holders * batch_size
        epochs = max(1.0, most_samples / self.num_samples)
        options = RunOptions(batch_size=batch_size, epochs=epochs, until=self._until, seed=seed, threads=1)
        between = self.between_scores(PlannedRun(family, workers, batch_size, workers // strategy.holders))
        try:
            result = simulate(self.job, strategy, workers, self._cluster, options)
        except JobFailed:
            raise
        except PolytempoError as error:
            most, why = round(epochs * self.num_samples), str(error).partition("\n")[0]
            return SamplesTrial(family, workers, batch_size, global_batch, seed, most, most, reached=False, failed=why)
        samples, reached = result.samples, bool(result.reached)
        before = max(0, samples - between) if reached else samples
        return SamplesTrial(family, workers, batch_size, global_batch, seed, samples, before, reached)

    def between_scores(self, run: PlannedRun) -> int:
        """Samples from one score of the run to the next."""
        steps = max(1, -(-self.num_samples // run.global_batch))
        return self.num_samples * max(1, -(-STEPS_BETWEEN_SCORES // steps))


def _check_target(job: Job, has_test: bool, until: Mapping[str, float]) -> None:
    """ValueError for a target that the job cannot be scored by."""
    if not until:
        raise ValueError("a plan needs a target: give until, such as accuracy=0.97 or loss=0.1")
    if not has_test:
        raise ValueError(
            f"job {job.name} has no test set, so no run can be seen to reach a target; let its data function return "
            "pt.Data(train, test)"
        )
    if "accuracy" in until and job.correct is None:
        raise ValueError(f"job {job.name} measures no accuracy; give the target as loss=…")
