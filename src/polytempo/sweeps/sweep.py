"""`sweep`: trains a job with many settings, one run a trial, and reports which are best.

out/sweep.trials.json     the space and the trials so far; the live page shows it, `resume` goes on from it
out/trial-000/            an ordinary run each
out/report.html           the best trial, a table, and a picture for each setting
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Unpack

import msgspec

from polytempo.cluster import Cluster
from polytempo.core import Strategy
from polytempo.core.system import files
from polytempo.core.system.url_path import UrlPath
from polytempo.engines.engine import EngineSetup
from polytempo.report.pages.trials_page import trials_page
from polytempo.report.saved_trials import MOST_TRIALS, SUFFIX, SavedTrial, SavedTrials, TrialsFile, read_trials
from polytempo.report.status.progress import Progress
from polytempo.report.status.rows import read_metrics
from polytempo.report.status.stream import ends_of
from polytempo.runs.frame.arguments import checked_job
from polytempo.runs.frame.chain import has_saved
from polytempo.runs.frame.folder import began
from polytempo.runs.run import run
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.callbacks.early_stop import is_better_small
from polytempo.spec.job import Job
from polytempo.spec.result import Result
from polytempo.spec.run_options import OptionKeywords, RunOptions, with_keywords
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import strategy_from
from polytempo.spec.text.notebook_table import rows_html
from polytempo.sweeps.sampler import combinations_of, sampler_of, settings_of
from polytempo.sweeps.search_space import Over, Space, space_of
from polytempo.sweeps.trial_process import train_apart
from polytempo.ui.run_facts import repeating

FILE = f"sweep{SUFFIX}"
TRIALS = 20
"""Trials of a sweep that names no number, but for a grid."""
OnTrial = Callable[[SavedTrials, SavedTrial], None] | None
FEWEST_SEEN = 4
"""A trial is stopped early only where so many have ended before."""


class Sweep:
    """A sweep that has ended: its trials, the best one, and the folder."""

    def __init__(self, saved: SavedTrials, out: Path) -> None:
        self.trials, self.out, self._saved = list(saved.trials), out, saved
        self.metric = saved.metric
        self.report = str(out / "report.html")

    @property
    def best(self) -> SavedTrial:
        """The best trial that has finished. ValueError if none has."""
        if (found := self._saved.best) is None:
            raise ValueError(f"no trial in {self.out} has finished with a score; see {self.report}")
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        best = self._saved.best
        plain: dict[str, Any] = msgspec.to_builtins(self._saved)
        return plain | {"best": None if best is None else best.number, "report": self.report}

    def _repr_html_(self) -> str:
        """The trials as a notebook shows them."""
        rows = [
            {"trial": str(each.number), **{name: str(value) for name, value in each.settings.items()}}
            | {"state": each.state, self.metric: "-" if each.value is None else f"{each.value:.4g}"}
            for each in self.trials
        ]
        return rows_html(self._saved.title, rows)


def sweep(
    job: Job | str,
    over: Over,
    strategy: Strategy | str = "sync_sgd",
    workers: int = 2,
    options: RunOptions | None = None,
    *,
    trials: int | None = None,
    goal: str | None = None,
    sampler: str | None = None,
    prune: bool = False,
    parallel: int = 1,
    engine: EngineSetup | str | None = None,
    cluster: Cluster | str | None = None,
    progress: Progress | None = None,
    on_trial: OnTrial = None,
    **more: Unpack[OptionKeywords],
) -> Sweep:
    """Train `job` with settings `over`, a trial after the other, and return them with the best one.

        found = pt.sweep("digits", over="lr=1e-3..1:log, ...", trials=20, out="runs/rates")
        found = pt.sweep(job, over={"lr": "1e-3..1:log", "strategy": ["sync_sgd", "local_sgd(period=8)"]}, out="runs/s")

    `over`: texts `name=low..high`, with `:log` behind for logarithms, or `name=a|b|c`; or a dict of names with such
    texts or lists. Names are `strategy`, `workers` and options of runs. `goal`: accuracy, loss or one of the job's
    metrics (default: accuracy where the job has one); names with "loss" are to be small. `sampler`: grid, random or tpe
    (Optuna); by default grid for lists without a number of trials, else tpe where Optuna is installed, else random.

    `prune` ends a trial that is worse than the median of the trials before it (`median_stop`). With `parallel` k
    trials train at a time, each in a process of its own, and trial n knows those up to n - k: so an equal sweep has
    equal trials. `cluster` simulates the trials. The option `seed` is the sweep's and each trial's.

    A trial that fails is reported, and the sweep goes on. `resume` goes on with an interrupted sweep, and with more
    `trials`: it has the trials of an undisturbed sweep. `on_trial(trials, trial)` hears of each trial's end.

    Errors: ValueError for settings that no run has, and for a folder of another sweep.
    """
    job, given = checked_job(job), with_keywords(options, more)
    if given.out is None or isinstance(given.out, UrlPath):
        raise ValueError("a sweep keeps its trials in a folder of this machine; give out='runs/sweep' (--out)")
    if parallel > 1 and job.origin is None:
        raise ValueError("parallel trials find their job by name; write the job into a file, or leave parallel out")
    space = space_of(over)
    chosen = sampler_of(sampler, space, trials)
    number = trials or (combinations_of(space) if chosen == "grid" else TRIALS)
    if not 0 < number <= MOST_TRIALS or parallel < 1:
        raise ValueError(f"trials={number} must be from 1 to {MOST_TRIALS:,}, and parallel={parallel} at least 1")
    if chosen == "grid":
        number = min(number, combinations_of(space))
    measured = [*(["accuracy"] if job.correct is not None else []), "loss", *job.metrics]
    metric = goal or measured[0]
    if metric.partition("/")[0] not in measured:
        raise ValueError(f"goal {metric}: scores of job {job.name} have {', '.join(measured)}; give one of these")
    facts = {"job": job.name, "strategy": str(strategy_from(strategy)), "workers": str(workers), "sampler": chosen}
    facts |= {"seed": str(given.seed), "prune": str(prune).lower(), "parallel": str(parallel)}
    saved = SavedTrials(
        title=f"{job.name}: {', '.join(space)}",
        metric=metric,
        better="less" if is_better_small(metric, "auto") else "more",
        space={name: str(each) for name, each in space.items()},
        facts=facts,
        num_trials=number,
    )
    RunSpec.of(job, strategy_from(strategy), workers, replace(given, resume=False))
    with began(given.out):
        running = _Running(_Trials(job, str(strategy_from(strategy)), workers, given, space), saved, on_trial)
        running.trainer = _Trainer(engine, cluster, progress, parallel > 1)
        running.all(parallel)
        return Sweep(running.saved, given.out)


class _Trials(NamedTuple):
    """Facts that all trials share."""

    job: Job
    strategy: str
    workers: int
    options: RunOptions
    space: Space


class _Trainer:
    """Trains one trial: in this process, in a process of its own, or simulated."""

    def __init__(
        self, engine: EngineSetup | str | None, cluster: Cluster | str | None, progress: Progress | None, apart: bool
    ) -> None:
        self._engine, self._cluster, self._progress, self._apart = engine, cluster, progress, apart

    def __call__(self, job: Job, strategy: str, workers: int, options: RunOptions) -> Result | Mapping[str, Any]:
        """The result of the run."""
        if self._apart:
            return train_apart(job, strategy, workers, options, self._engine, self._cluster)
        if self._cluster is not None:
            return simulate(job, strategy, workers, self._cluster, options, progress=self._progress)
        return run(job, strategy, workers, options, engine=self._engine, progress=self._progress)


class _Running:
    """The trials so far, and the file about them."""

    trainer: _Trainer

    def __init__(self, shared: _Trials, saved: SavedTrials, on_trial: OnTrial) -> None:
        assert isinstance(shared.options.out, Path)
        self._shared, self._out, self._on_trial = shared, shared.options.out, on_trial
        self._lock = threading.Lock()
        if (self._out / FILE).is_file():
            saved = _going_on(read_trials(self._out / FILE), saved, self._out, resume=shared.options.resume)
        self._file = TrialsFile(self._out / FILE, saved)

    @property
    def saved(self) -> SavedTrials:
        """The sweep so far."""
        return self._file.saved

    def all(self, parallel: int) -> None:
        """Train all trials, `parallel` at a time; trial n begins when all up to n - `parallel` have ended."""
        self._file.write()
        try:
            if parallel == 1:
                for number in range(self.saved.num_trials):
                    self._trial(number, number)
                return
            with ThreadPoolExecutor(parallel) as pool:
                waiting: list[Future[None]] = []
                for number in range(self.saved.num_trials):
                    if number >= parallel:
                        waiting[number - parallel].result()
                    waiting.append(pool.submit(self._trial, number, max(0, number - parallel + 1)))
                for each in waiting:
                    each.result()
        finally:
            files.replace(self._out / "report.html", trials_page(self.saved))

    def _trial(self, number: int, known: int) -> None:
        """Train trial `number`, which may know those before `known`, unless it has ended."""
        found = self._of(number)
        if found is not None and found.state != "running":
            return
        seen = [each for each in self.saved.trials if each.number < known]
        shared, sampler = self._shared, self.saved.facts["sampler"]
        settings = settings_of(sampler, shared.space, shared.options.seed, number, seen, self.saved.better)
        trial = SavedTrial(number=number, settings=settings, state="running", run=f"trial-{number:03d}")
        self._keep(trial)
        try:
            self._keep(self._trained(trial, seen))
        except Exception as error:  # the others go on
            why = str(error).partition("\n")[0] or type(error).__name__
            self._keep(msgspec.structs.replace(trial, state="failed", why=why[:2_000]))

    def _trained(self, trial: SavedTrial, seen: Sequence[SavedTrial]) -> SavedTrial:
        settings, shared = dict(trial.settings), self._shared
        strategy, workers = settings.pop("strategy", shared.strategy), settings.pop("workers", shared.workers)
        folder = self._out / trial.run
        callbacks = list(shared.options.callbacks)
        if self.saved.facts["prune"] == "true" and (stop := self._stop(seen)):
            callbacks.append(stop)
        given: dict[str, Any] = {**settings, "out": folder, "callbacks": callbacks, "resume": has_saved(folder)}
        result = self.trainer(shared.job, str(strategy), int(workers), replace(shared.options, **given))
        plain = result.as_json() if isinstance(result, Result) else result
        value = {"loss": plain["loss"], "accuracy": plain["accuracy"], **(plain["metrics"] or {})}.get(
            self.saved.metric
        )
        stopped = any(
            each["asked_to_stop_at"] is not None and each["callback"].startswith("median_stop(")
            for each in plain["callbacks"] or ()
        )
        return msgspec.structs.replace(
            trial, state="pruned" if stopped else "finished", value=value, steps=plain["steps"]
        )

    def _stop(self, seen: Sequence[SavedTrial]) -> str:
        """The callback with the medians of the trials before; "" where there are too few."""
        curves = []
        for each in seen:
            run = self._out / each.run
            if each.state in ("finished", "pruned"):
                rows = {row["step"]: row.get(self.saved.metric) for row in read_metrics(run) if row["kind"] == "test"}
                curves.append([value for _, value in sorted(rows.items()) if value is not None])
        medians: list[float] = []
        while len(there := [curve[len(medians)] for curve in curves if len(curve) > len(medians)]) >= FEWEST_SEEN:
            medians.append(median(there))
        told = " ".join(map(repr, medians))
        return f"median_stop(metric={self.saved.metric!r}, medians={told!r}, better={self.saved.better})" * bool(told)

    def _of(self, number: int) -> SavedTrial | None:
        return next((each for each in self.saved.trials if each.number == number), None)

    def _keep(self, trial: SavedTrial) -> None:
        with self._lock:
            self._file.keep(trial)
            if (best := self.saved.best) is not None:
                self._file.keep(trial, self._command(best))
            if self._on_trial is not None and trial.state != "running":
                self._on_trial(self.saved, trial)

    def _command(self, best: SavedTrial) -> str:
        """The command that repeats the best trial; for a job in no file, one with its settings alone."""
        start, _ = ends_of(self._out / best.run)
        if start is not None and (told := repeating(start)):
            return told
        shared = self._shared
        settings = {"strategy": shared.strategy, "workers": shared.workers} | best.settings
        flags = " ".join(f"--{name.replace('_', '-')} {_quoted(value)}" for name, value in settings.items())
        return f"polytempo train {shared.job.origin or shared.job.name} {flags}"


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f"'{text}'" if any(not (c.isalnum() or c in "._+-") for c in text) else text


def _going_on(found: SavedTrials, asked: SavedTrials, out: Path, *, resume: bool) -> SavedTrials:
    """The sweep in the folder, if it is the same one; with the larger number of trials."""
    if not resume:
        raise ValueError(f"{out} holds a sweep; go on with resume=True (--resume), or name another folder")
    for name in ("metric", "space", "facts"):
        ours, theirs = getattr(asked, name), getattr(found, name)
        if ours != theirs:
            raise ValueError(f"{out} holds a sweep with {name} {theirs}, and not {ours}; give that, or another folder")
    return msgspec.structs.replace(found, num_trials=max(found.num_trials, asked.num_trials))
