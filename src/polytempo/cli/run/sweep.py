"""`polytempo sweep`."""

from __future__ import annotations

import sys

import typer

from polytempo.cli.options.plan import found_job, show_plan
from polytempo.cli.options.request import RunRequest
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table
from polytempo.report.saved_trials import SavedTrial, SavedTrials
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.spec.text.plain_text import plain_text
from polytempo.sweeps.sweep import sweep as swept


def sweep(request: RunRequest) -> None:
    """Train the job with many settings, and show the trials, best first."""
    command, taken, _, engine = request
    if command.available is not None:
        raise ValueError("--available is of one run; leave it out, for a sweep has many")
    with notes_on_stderr():
        job = found_job(request.job)
    if command.dry_run:
        strategy = parse_strategy(command.strategy)
        show_plan(job, [strategy], "process", command.workers, taken, as_json=command.json)
        return
    with notes_on_stderr():
        found = swept(
            *(job, command.over, command.strategy, command.workers, taken),
            trials=command.trials,
            goal=command.goal,
            sampler=command.sampler,
            prune=command.prune,
            parallel=command.parallel,
            engine=str(engine),
            cluster=command.cluster,
            on_trial=_say,
        )
    told = found.as_json()
    if command.json:
        show_json(told)
    else:
        _show(found.trials, told)
    if told["best"] is None:
        raise typer.Exit(1)


def _say(so_far: SavedTrials, trial: SavedTrial) -> None:
    """A line on standard error for a trial that has ended."""
    best = so_far.best
    found = trial.why if trial.state == "failed" else f"{so_far.metric} {_text(trial.value)}"
    told = "" if best is None else f"; best: {_text(best.value)}, trial {best.number}"
    which = f"trial {trial.number} ({trial.number + 1} of {so_far.num_trials})"
    line = f"{which}, {_settings(trial)}: {trial.state}, {found}{told}"
    print(plain_text(line), file=sys.stderr, flush=True)


def _show(trials: list[SavedTrial], told: dict[str, object]) -> None:
    names = list(trials[0].settings) if trials else []
    sign = 1.0 if told["better"] == "less" else -1.0
    ordered = sorted(trials, key=lambda each: (each.value is None, sign * (each.value or 0.0)))
    rows = [
        (str(each.number), *(_text(each.settings[name]) for name in names), _text(each.value), each.state)
        for each in ordered
    ]
    show_table(("trial", *names, str(told["metric"]), "state"), rows)
    if told["command"]:
        print(f"\n{told['command']}")
    print(f"report: {told['report']}")


def _settings(trial: SavedTrial) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in trial.settings.items())


def _text(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
