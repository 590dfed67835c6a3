"""`polytempo compare`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from polytempo.cli.catalogue import strategies_from
from polytempo.cli.folder import checked_folder, default_folder
from polytempo.cli.options import train_options
from polytempo.cli.plan import job_of, progress_of, run_name, run_options, show_plan
from polytempo.cli.show import notes_on_stderr, say_diverged, say_unreached, show_json, show_results
from polytempo.engines.run import compare as compared


def compare(given: Mapping[str, object], config: Path | None) -> None:
    """Train one job with one strategy after the other."""
    options = train_options(given, config)
    if options.resume:
        raise ValueError("--resume: compare begins anew; `polytempo train --resume --out` goes on with one of its runs")
    strategies = strategies_from(options.strategies)
    with notes_on_stderr():
        job = job_of(options)
    name = run_name(options, "compare")
    out = default_folder(name, resume=False)
    if options.out is not None:
        out = checked_folder(options.out, resume=False, force=options.force)
    taken = run_options(options, out)
    if options.dry_run:
        names = [strategy.name for strategy in strategies]
        show_plan(job, names, "process", options.workers, taken, as_json=options.as_json)
        return
    with notes_on_stderr():
        results = compared(job, strategies, options.workers, taken, progress=progress_of(job, taken, len(strategies)))
    figures = [result.as_json() for result in results]
    if options.as_json:
        show_json(figures)
    else:
        show_results(figures)
        print(f"report: {out / 'report.html'}")
    say_unreached([each for each in figures if not each["diverged"]])
    if say_diverged(figures):
        raise typer.Exit(1)
