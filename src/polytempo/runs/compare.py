"""`compare`: a job with one strategy after the other, side by side in one folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Unpack

from polytempo.core import NotFinite, Strategy
from polytempo.core.errors import PolytempoError
from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.engines.engine import EngineSetup, checked_engine
from polytempo.report.pages.page import write_report
from polytempo.report.pictures.picture import write_picture
from polytempo.report.runs import has_result, load_result, load_run
from polytempo.report.status.progress import Progress, shown_progress
from polytempo.runs.frame.arguments import check_workers, checked_job
from polytempo.runs.frame.chain import has_saved
from polytempo.runs.frame.divergence import diverged_result
from polytempo.runs.frame.folder import began
from polytempo.runs.frame.folder_names import slug
from polytempo.runs.run import in_order, performed, prepare
from polytempo.spec.job import Job
from polytempo.spec.result import Result, Results
from polytempo.spec.run_options import OptionKeywords, RunOptions, with_keywords
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.catalogue import parse_strategies, strategy_from


class ComparisonIncomplete(PolytempoError):
    """Strategies of a comparison that failed, by name, with the reason; `results` are of the other strategies."""

    def __init__(self, failures: dict[str, Exception], results: list[Result]) -> None:
        self.failures, self.results = failures, results
        super().__init__("\n".join(f"{strategy}: {_why(error)}" for strategy, error in failures.items()))


def compare(
    job: Job | str,
    strategies: Sequence[Strategy | str] | str,
    workers: int = 2,
    options: RunOptions | None = None,
    *,
    engine: EngineSetup | str | None = None,
    progress: Progress | None = None,
    **more: Unpack[OptionKeywords],
) -> Results:
    """Train `job` with one strategy after the other, and report them side by side in `out`.

    Every strategy is checked on the job before the first one runs. A strategy that diverges (`NotFinite`) does not end
    the others: `diverged` of its result names the value that was not finite. Nor does a failing strategy: at the end
    `ComparisonIncomplete` names it, and holds the others' results. However it ends, `out` has `compare.json`, a page
    and a picture of the strategies that have ended, and `resume` goes on with the others.
    """
    job, options, setup = checked_job(job), with_keywords(options, more), checked_engine(engine)
    if not strategies:
        raise ValueError("compare needs at least one strategy; give some, such as [pt.strategies.sync_sgd()]")
    if isinstance(strategies, str):
        strategies = parse_strategies(strategies)
    asked = [strategy_from(each) for each in ([strategies] if isinstance(strategies, Strategy) else strategies)]
    for strategy in asked:
        check_workers(strategy, workers)
    specs = [RunSpec.of(job, strategy, workers, options) for strategy in asked]
    setup, progress = prepare(in_order(specs), setup), shown_progress(progress, len(specs))
    with began(options.out):
        comparison = _Comparison(specs)
        try:
            for number in range(len(specs)):
                comparison.run(number, setup, progress)
        finally:
            comparison.report()
    return comparison.ended()


class _Comparison:
    """The results and failures of the strategies so far."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        self._out = specs[0].options.out
        self._specs = [_in_folder(spec, number) for number, spec in enumerate(specs, start=1)]
        self._results: dict[int, Result] = {}
        self._failures: dict[int, Exception] = {}

    def run(self, number: int, engine: EngineSetup, progress: Progress | None) -> None:
        """Train by one strategy, unless it has ended in a comparison that goes on."""
        spec = self._specs[number]
        try:
            self._results[number] = _found(spec) or performed(_going_on(spec), engine, progress)
        except NotFinite as error:
            self._results[number] = diverged_result(spec, error)
        except (PolytempoError, ValueError, OSError, RuntimeError) as error:
            self._failures[number] = error

    def report(self) -> None:
        """Write one page, one picture and one JSON list of the results so far."""
        folders = [spec.options.out for spec in self._specs]
        if self._out is None or not any(folder is not None and folder.exists() for folder in folders):
            return
        listed = json.dumps([result.as_json() for _, result in sorted(self._results.items())], indent=2)
        files.replace(self._out / "compare.json", listed + "\n")
        runs = [load_run(folder) for n, folder in enumerate(folders) if folder is not None and n in self._results]
        if runs:
            missing = [
                f"{spec.strategy} has not ended: {_why(self._failures.get(number))}"
                for number, spec in enumerate(self._specs)
                if number not in self._results
            ]
            title = f"{self._specs[0].job.name}: strategies"
            write_report(self._out / "report.html", runs, title=title, notes=missing)
            write_picture(self._out / "compare.png", runs)

    def ended(self) -> Results:
        """All results, in order. Raises the errors of failed strategies."""
        made = [(self._specs[number], result) for number, result in sorted(self._results.items())]
        results = Results(result.made_by(spec.job, spec.options.out) for spec, result in made)
        if self._failures and not results:
            raise next(iter(self._failures.values()))
        if self._failures:
            failures = {str(self._specs[number].strategy): error for number, error in self._failures.items()}
            raise ComparisonIncomplete(failures, results)
        return results


def _in_folder(spec: RunSpec, number: int) -> RunSpec:
    out = spec.options.out
    folder = None if out is None else out / f"{number:02d}-{slug(str(spec.strategy))}"
    return replace(spec, options=replace(spec.options, out=folder))


def _found(spec: RunSpec) -> Result | None:
    """The result that an earlier comparison has left; None where there is more to do."""
    options, out = spec.options, spec.options.out
    if not options.resume or out is None or not has_result(out):
        return None
    plain = load_result(out)
    result = Result(**{each.name: plain[each.name] for each in fields(Result) if each.name in plain})
    asked = {"job": spec.job.name, "workers": spec.workers, "batch_size": spec.batch_size, "seed": spec.seed}
    for name, value in asked.items():
        if getattr(result, name) != value:
            raise ValueError(f"{out} has a run with {name}={getattr(result, name)}, and not {value}; give that value")
    enough = (result.steps, options.steps), (result.epochs, spec.epochs)
    ended = any(most is not None and done >= most for done, most in enough)
    return result if (ended and not result.left) or result.diverged or result.reached else None


def _going_on(spec: RunSpec) -> RunSpec:
    """A run that resumes where it has saved something, and begins where it has not."""
    out: Place | None = spec.options.out
    saved = out is not None and (has_saved(out) or spec.strategy.before is not None)  # a chain looks itself
    return replace(spec, options=replace(spec.options, resume=spec.options.resume and saved))


def _why(error: Exception | None) -> str:
    return "it was interrupted" if error is None else str(error).partition("\n")[0] or type(error).__name__
