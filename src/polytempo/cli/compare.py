"""`polytempo compare`."""

from __future__ import annotations

import typer

from polytempo.cli.plan import found_job, run_options, show_plan
from polytempo.cli.request import RunRequest
from polytempo.cli.show import notes_on_stderr, say_diverged, say_unreached, show_json, show_results
from polytempo.report.progress import Progress
from polytempo.runs.arguments import parse_engine
from polytempo.runs.run import compare as compared
from polytempo.spec.catalogue import parse_strategies


def compare(request: RunRequest) -> None:
    """Train one job with one strategy after the other."""
    options = request.options
    strategies = parse_strategies(options.strategies)
    with notes_on_stderr():
        job = found_job(request.job)
    taken = run_options(request)
    if options.dry_run:
        names = [strategy.name for strategy in strategies]
        show_plan(job, names, "process", options.workers, taken, as_json=options.as_json)
        return
    engine, progress = parse_engine(options.engine), Progress(num_runs=len(strategies))
    with notes_on_stderr():
        results = compared(job, strategies, options.workers, taken, engine=engine, progress=progress)
    figures = [result.as_json() for result in results]
    if options.as_json:
        show_json(figures)
    else:
        show_results(figures)
        print(f"report: {str(taken.out).rstrip('/')}/report.html")
    say_unreached([each for each in figures if not each["diverged"]])
    if say_diverged(figures):
        raise typer.Exit(1)
