"""`polytempo compare`."""

from __future__ import annotations

import sys
from typing import Any

import typer

from polytempo.cli.options.plan import check_url, found_job, show_plan
from polytempo.cli.options.request import RunRequest
from polytempo.cli.options.show import notes_on_stderr, say_diverged, say_unreached, show_json, show_results
from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.engines.engine import parse_engine
from polytempo.report.status.progress import Progress
from polytempo.runs.compare import ComparisonIncomplete
from polytempo.runs.compare import compare as compared
from polytempo.spec.text.catalogue import parse_strategies
from polytempo.spec.text.plain_text import plain_text


def compare(request: RunRequest) -> None:
    """Train one job with one strategy after the other."""
    command, taken, _, engine_name = request
    strategies = parse_strategies(command.strategies)
    with notes_on_stderr():
        job = found_job(request.job)
    check_url(taken)
    if command.dry_run:
        show_plan(job, strategies, "process", command.workers, taken, as_json=command.json)
        return
    engine, progress, failures = parse_engine(engine_name), Progress(num_runs=len(strategies)), ""
    with notes_on_stderr():
        try:
            results = compared(job, strategies, command.workers, taken, engine=engine, progress=progress)
            figures = [result.as_json() for result in results]
        except ComparisonIncomplete as error:
            failures, figures = str(error), [result.as_json() for result in error.results]
        except BaseException:
            if ended := _ended(taken.out):
                _show(ended, taken.out, as_json=command.json)
            raise
    _show(figures, taken.out, as_json=command.json)
    say_unreached([each for each in figures if not each["diverged"]])
    for failure in failures.splitlines():
        print(plain_text(f"error: {failure}"), file=sys.stderr)
    if say_diverged(figures) or failures:
        raise typer.Exit(1)


def _ended(out: Place | None) -> list[dict[str, Any]]:
    """The results of the strategies that had ended when the comparison did not go on."""
    if out is None or not (out / "compare.json").is_file():
        return []
    found: list[dict[str, Any]] = files.parsed(out / "compare.json")
    return found


def _show(figures: list[dict[str, Any]], out: Place | None, *, as_json: bool) -> None:
    if as_json:
        show_json(figures)
    else:
        show_results(figures)
        print(f"report: {str(out).rstrip('/')}/report.html")
