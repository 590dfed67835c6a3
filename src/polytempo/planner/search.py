"""`plan_run`: prices every run, tries the families in rounds, each with the better half, and chooses.

    round   families     trials of each
    1       all          about the job's own batch, and a large one, with one seed
    2       a half       the batches of the fastest and of the cheapest run, with two other seeds
    3       a quarter    the same, with four other seeds
    4                    the winner's family at the winner's batch, until that was tried

A trial ends when even the fastest and the cheapest run of its family would take twice as long, and cost twice as much,
as the best known run. Limits do not change the trials, so a larger budget never gives a slower winner.

Source of the rounds: K. Jamieson and A. Talwalkar, "Non-stochastic best arm identification", 2016.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import torch

from polytempo.cluster import Cluster
from polytempo.core import PolytempoError
from polytempo.core.errors import JobFailed
from polytempo.data.shard import DataShard
from polytempo.device import out_of_memory
from polytempo.planner.by_speed import with_runs_by_speed
from polytempo.planner.forecast import DRAWS, RunForecast, Uncertainty, forecast, uncertainty_of
from polytempo.planner.front import PlanLimits, chance, front, ranked, reversal, runner_up
from polytempo.planner.plan import RunPlan
from polytempo.planner.run_price import Pricer, RunPrice
from polytempo.planner.samples_law import SamplesLaw, SamplesTrial, deviation, drawn_laws, fitted, middle
from polytempo.planner.search_space import LeftOut, PlannedRun, SearchSpace
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.job.context import check_length
from polytempo.training.job.evaluate import check_measures
from polytempo.training.job.program import STEPS_BETWEEN_SCORES

_TRIED_WORKERS = 4
"""A trial has at most so many workers, or the workers that hold one model."""
_SLACK = 2.0
"""A trial ends when its run would take, and cost, so many times as much as the best known run."""
_MOST_RUNS_OF_JOB = 3
"""A trial has at most so many times the job's epochs."""
_LARGE = 4
"""The large batch of the first round is at most a fourth of the data."""
_MOST_CHECKS = 6
"""Trials of the winner at its batch, in the last round."""
_NEAR = 1.5
"""A batch counts as tried if a batch within this factor was tried."""
_PRECISE = 12
"""So many of the best runs are priced over more steps."""
_PRECISE_ROUNDS = 4


Tell = Callable[[SamplesTrial], object]


def plan_run(
    job: Job,
    space: SearchSpace,
    until: Mapping[str, float],
    cluster: Cluster,
    limits: PlanLimits = PlanLimits(),  # noqa: B008  # a constant
    *,
    data: str | Path | None = None,
    spread: Mapping[str, float] | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
    device: str = "auto",
    tell: Tell = lambda trial: None,
) -> RunPlan:
    """The plan for `job` to reach `until`, such as `{"accuracy": 0.97}`, on `cluster`, among the runs of `space`.

    A pure function of its arguments: the same seed gives the same plan, but for `took_s`. KeyboardInterrupt ends the
    search, and the plan has the findings so far; without any it is raised again. `spread`: the spread of the cluster's
    measurements (`cluster.cluster_file.read_spread`). `device`: the place of the trials' gradients; a trial that does
    not fit into its memory has not reached the target. `tell` hears of each trial.

    Errors: ValueError for a target without a score of the job, an unknown strategy, and if no run is left.
    """
    began_s = time.perf_counter()
    uncertain = uncertainty_of(cluster, spread or {})
    search = _Search(job, space, until, cluster, data, seed, say, tell, uncertain=uncertain, device=device)
    interrupted = _search_ends_early(search)
    forecasts = search.forecasts()
    order = ranked(forecasts, limits)
    winner, second = (order[0] if order else None), (runner_up(order) if order else None)
    turned = None
    if winner is not None and second is not None and not interrupted:
        say("looking for conditions that would change the choice")
        try:
            turned = reversal(winner, second, search.pricer, limits)
        except KeyboardInterrupt:
            interrupted = True
    return RunPlan(
        job=job.name,
        cluster=cluster.name,
        until=until,
        limits=limits,
        num_runs=len(search.prices),
        forecasts=sorted(forecasts, key=lambda one: (one.seconds, one.run)),
        front=front([each for each in forecasts if limits._replace(deadline_s=None, budget=None).hold(each)]),
        winner=winner,
        runner_up=second,
        chance=None if winner is None or second is None else chance(winner, second, limits),
        reversal=turned,
        laws=search.laws(),
        noise=search.noise(),
        trials=[trial for trials in search.trials.values() for trial in trials],
        given_up=search.given_up(),
        left_out=search.left_out,
        interrupted=interrupted,
        took_s=time.perf_counter() - began_s,
    )


def _search_ends_early(search: _Search) -> bool:
    """Search; True if KeyboardInterrupt has ended that. It is raised again if nothing was found."""
    try:
        search.price_all()
        search.try_families()
        search.price_precisely()
    except KeyboardInterrupt:
        if not search.reached():
            raise
        return True
    return False


class _Search:
    """The prices and trials so far."""

    def __init__(
        self,
        job: Job,
        space: SearchSpace,
        until: Mapping[str, float],
        cluster: Cluster,
        data: str | Path | None,
        seed: int,
        say: Callable[[str], None],
        tell: Tell,
        *,
        uncertain: Uncertainty,
        device: str,
    ) -> None:
        self.pricer = Pricer(job, data, cluster)
        self._tried_by = Trials(self.pricer.job, None, cluster, until, seed, device)
        self._seed, self._say, self._tell, self._uncertain = seed, say, tell, uncertain
        runs, self.left_out = space.runs()
        self._runs = with_runs_by_speed(runs, cluster)
        self.prices: dict[PlannedRun, RunPrice] = {}
        self._hosts = {run: self.pricer.hosts(run) for run in self._runs}
        self.trials: dict[str, list[SamplesTrial]] = defaultdict(list)
        self._most_samples = _MOST_RUNS_OF_JOB * job.epochs * self._tried_by.num_samples

    def price_all(self) -> None:
        """Price each run; runs that cannot be simulated are left out. ValueError if no run can."""
        for number, run in enumerate(self._runs, 1):
            self._say(f"priced {number} of {len(self._runs)} runs")
            if run.global_batch > self._tried_by.num_samples:
                self.left_out.append(LeftOut(str(run), "a step would have more samples than the data set"))
                continue
            try:
                self.prices[run] = self.pricer.price(run)
            except (ValueError, PolytempoError) as error:
                self.left_out.append(LeftOut(str(run), str(error)))
        if not self.prices:
            why = self.left_out[0] if self.left_out else LeftOut("the space", "it is empty")
            raise ValueError(f"no run of this space can be made; {why.what}: {why.why}")

    def try_families(self) -> None:
        """The three rounds."""
        families = list(dict.fromkeys(run.family for run in self.prices))
        for family in families:
            runs = self._of(family)
            own = min(runs, key=lambda run: (abs(math.log(run.global_batch / self.pricer.job.batch_size)), run))
            most = self._tried_by.num_samples / _LARGE
            large = max(runs, key=lambda run: (run.global_batch <= most, run.global_batch))
            if self._try(own, 0):
                self._try(large, 0)
        for share, seeds in ((2, (1, 2)), (4, (3, 4, 5, 6))):
            for family in self._best(max(2, -(-len(families) // share))):
                for run in self._promising(family):
                    for seed in seeds:
                        self._try(run, seed)
        for number in range(_MOST_CHECKS):
            known = self._expected()
            best = min(known, key=known.__getitem__, default=None)
            if best is None or self._was_tried(best):
                return
            self._try(best, number)

    def price_precisely(self) -> None:
        """Price the runs that may win, cheap runs and fast runs, over more steps."""
        found = self.forecasts()
        chosen = sorted(found, key=lambda one: one.seconds)[:_PRECISE] + sorted(found, key=lambda one: one.host_s)[:2]
        for each in chosen:
            self._say("pricing the best runs over more steps")
            self.prices[each.run] = self.pricer.price(each.run, rounds=_PRECISE_ROUNDS)

    def forecasts(self) -> list[RunForecast]:
        """The forecast of each run, if its family has reached the target at such a batch."""
        noise, found = self.noise(), []
        for family, trials in self.reached().items():
            drawn = drawn_laws(trials, noise, DRAWS, Random(f"{self._seed}/{family}"))
            found += [
                forecast(
                    run,
                    self.prices[run],
                    drawn,
                    noise=noise,
                    between_scores=self._tried_by.between_scores(run),
                    uncertain=self._uncertain,
                    hosts=self._hosts[run],
                    memory_bytes=self.pricer.memory_bytes(run),
                    seed=self._seed,
                )
                for run in self._reaching(family)
            ]
        return found

    def reached(self) -> dict[str, list[SamplesTrial]]:
        """The trials that reached the target, by family."""
        found = {family: [each for each in trials if each.reached] for family, trials in self.trials.items()}
        return {family: trials for family, trials in found.items() if trials}

    def laws(self) -> dict[str, SamplesLaw]:
        """Family -> law, fitted to the trials."""
        return {
            family: fitted([(each.global_batch, middle(each)) for each in trials])
            for family, trials in self.reached().items()
        }

    def noise(self) -> float:
        """See `samples_law.deviation`."""
        return deviation(list(self.reached().values()))

    def given_up(self) -> list[LeftOut]:
        """Batches of families with trials that ended early."""
        found = []
        for family, trials in self.trials.items():
            vain = {each.global_batch: each for each in trials if not each.reached}
            for batch, trial in sorted(vain.items()):
                why = f"a trial had not reached the target after {trial.samples:,} samples"
                if trial.failed is not None:
                    why = f"a trial failed: {trial.failed}"
                found.append(LeftOut(f"{family}, {batch:,} samples a step", why))
        return found

    def _of(self, family: str) -> list[PlannedRun]:
        return [run for run in self.prices if run.family == family]

    def _reaching(self, family: str) -> list[PlannedRun]:
        """The family's runs before any batch with mostly vain trials."""
        by_batch: dict[int, list[bool]] = defaultdict(list)
        for trial in self.trials[family]:
            by_batch[trial.global_batch].append(trial.reached)
        vain = [batch for batch, reached in by_batch.items() if 2 * sum(reached) < len(reached)]
        good = [batch for batch in by_batch if batch not in vain]
        if not good:
            return []
        low = max((batch for batch in vain if batch < min(good)), default=0)
        high = min((batch for batch in vain if batch > min(good)), default=math.inf)
        return [run for run in self._of(family) if low < run.global_batch < high]

    def _expected(self) -> dict[PlannedRun, float]:
        """Seconds to the target by the laws as they are fitted, without an interval."""
        laws = self.laws()
        return {
            run: law.samples(run.global_batch) / self.prices[run].samples_per_s
            for family, law in laws.items()
            for run in self._reaching(family)
        }

    def _was_tried(self, run: PlannedRun) -> bool:
        tried = [each.global_batch for each in self.trials[run.family]]
        return any(1 / _NEAR <= batch / run.global_batch <= _NEAR for batch in tried)

    def _try(self, run: PlannedRun, number: int) -> bool:
        """Try the run's family at the run's batch, with few workers. True if it reached the target."""
        holders = parse_strategy(run.family).holders
        models = min(run.models, max(1, _TRIED_WORKERS // holders))
        workers, batch_size = models * holders, max(1, round(run.global_batch / models))
        for each in self.trials[run.family]:
            if (each.workers, each.batch_size, each.seed) == (workers, batch_size, self._seed + number):
                return each.reached
        self._say(f"trial {1 + sum(map(len, self.trials.values()))}: {run.family}")
        trial = self._tried_by.run(run.family, workers, batch_size, number, self._most(run.family))
        self.trials[run.family].append(trial)
        self._tell(trial)
        return trial.reached

    def _most(self, family: str) -> float:
        """The most samples of a trial: a run of the family could still be among the fastest or the cheapest."""
        known = self._expected()
        if not known:
            return self._most_samples
        seconds = min(known.values())
        host_s = min(each * self._hosts[run] for run, each in known.items())
        rates = [(self.prices[run].samples_per_s, self._hosts[run]) for run in self._of(family)]
        most = max(max(seconds * rate, host_s * rate / hosts) for rate, hosts in rates)
        return min(self._most_samples, _SLACK * most)

    def _best(self, count: int) -> list[str]:
        known = self._expected()
        if not known:
            return []
        fastest = list(dict.fromkeys(run.family for run in sorted(known, key=known.__getitem__)))
        cheapest = min(known, key=lambda run: known[run] * self._hosts[run]).family
        return list(dict.fromkeys([*fastest[:count], cheapest]))

    def _promising(self, family: str) -> list[PlannedRun]:
        own = {run: seconds for run, seconds in self._expected().items() if run.family == family}
        if not own:
            return []
        return list(
            dict.fromkeys([min(own, key=own.__getitem__), min(own, key=lambda run: own[run] * self._hosts[run])])
        )


class Trials:
    """The trials of one job, cluster and target. `device`: the place of their gradients."""

    def __init__(
        self,
        job: Job,
        data: str | Path | None,
        cluster: Cluster,
        until: Mapping[str, float],
        seed: int,
        device: str = "auto",
    ) -> None:
        held = data_of(job, data)
        _check_target(job, held.test is not None, until)
        self.job, self._cluster, self._until, self._seed, self._device = job, cluster, until, seed, device
        self.num_samples = check_length(DataShard(held.training(), rank=0, size=1, batch_size=1))

    def run(self, family: str, workers: int, batch_size: int, number: int, most_samples: float) -> SamplesTrial:
        """Train until the target, or for `most_samples` at most, with seed number `number`.

        A run that fails has not reached it, and `failed` says why. Errors: JobFailed of the job's own functions.
        """
        strategy, seed = parse_strategy(family), self._seed + number
        global_batch = workers // strategy.holders * batch_size
        epochs = max(1.0, most_samples / self.num_samples)
        options = RunOptions(
            batch_size=batch_size, epochs=epochs, until=self._until, seed=seed, threads=1, device=self._device
        )
        between = self.between_scores(PlannedRun(family, workers, batch_size, workers // strategy.holders))
        try:
            result = simulate(self.job, strategy, workers, self._cluster, options)
        except (PolytempoError, torch.OutOfMemoryError) as error:
            if isinstance(error, JobFailed) and not out_of_memory(error):
                raise
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
    """ValueError for a target without a score of the job."""
    if not until:
        raise ValueError("a plan needs a target: give until, such as accuracy=0.97 or loss=0.1")
    if not has_test:
        raise ValueError(
            f"job {job.name} has no test set, so no run can be seen to reach a target; let its data function return "
            "pt.Data(train, test)"
        )
    if "accuracy" in until and job.correct is None:
        raise ValueError(f"job {job.name} measures no accuracy; give the target as loss=…")
    check_measures(job, until)
