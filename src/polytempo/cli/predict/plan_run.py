"""`polytempo plan JOB`: a strategy, workers and a batch; the front, and changes that would turn the choice."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from polytempo.cli.options.failure import INTERRUPTED
from polytempo.cli.options.measured_hosts import beyond_measured
from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table, size
from polytempo.cli.predict.plan_options import PlanOptions
from polytempo.core.system import files
from polytempo.core.system.url_path import without_secrets
from polytempo.planner.forecast import RunForecast
from polytempo.planner.front import PlanLimits, Reversal
from polytempo.planner.plan import NOT_CONSIDERED, RunPlan
from polytempo.planner.samples_law import SamplesTrial
from polytempo.planner.search import plan_run as planned
from polytempo.planner.search_space import SearchSpace, usual_strategies
from polytempo.planner.worker_limit import CAUSES, WorkerLimit, worker_limit
from polytempo.report.pages.plan_page import batch_of, money_unit, plan_page, short_names
from polytempo.report.pages.summary import human_seconds
from polytempo.report.runs import plural
from polytempo.report.saved_plan import write_plan
from polytempo.report.saved_trials import SUFFIX, SavedTrials, Setting, TrialsFile
from polytempo.runs.simulated.asked_device import here, on_asked_device
from polytempo.spec.job import Job
from polytempo.spec.text.call import split_calls
from polytempo.spec.text.catalogue import parse_cluster

_COLUMNS = ("strategy", "workers", "batch", "time", "from", "to", "hosts")
_LINE = 78


def plan_run(asked: PlanOptions) -> None:
    """Plan, and show the choice; exit code 130 where Ctrl-C ended the search and something was found."""
    page, workers = asked.page, asked.workers
    assert workers is not None
    cluster = on_asked_device(parse_cluster(asked.cluster or "ethernet", asked.stragglers), asked.device)
    memory_bytes = None if asked.memory_gb is None else 1e9 * asked.memory_gb
    if memory_bytes is None and cluster.device is not None:
        memory_bytes = cluster.device.memory_of_each(cluster.workers_per_host)
    limits = PlanLimits(memory_bytes, asked.deadline_s, asked.budget, asked.price)
    with notes_on_stderr():
        job = found_job(asked.job)
        space = _space(asked, job, workers)
        show, clear = _progress()
        try:
            found = planned(
                *(job, space, asked.until, cluster, limits),
                data=asked.data,
                spread=asked.spread,
                seed=asked.seed,
                say=show,
                device=here(asked.device),
                tell=_tell(page, job, asked.until),
            )
            limit = worker_limit(found.forecasts, limits, job, asked.data, cluster) if asked.limit else None
        finally:
            clear()
    plain = found.as_json()
    beyond = beyond_measured(asked.cluster, max(workers))
    commands, sentences = _commands(asked, found), [*_sentences(found, plain), *([] if beyond is None else [beyond])]
    if limit is not None:
        plain["limit"] = limit.as_json()
        sentences.append(_limit(limit))
    if page is not None:
        kept = _commands(asked, found, without_secrets)
        files.replace(page, plan_page(plain, sentences, kept))
        write_plan(page, plain, money_unit(plain), sentences, kept)
    if asked.json:
        show_json({**plain, "sentences": sentences, "commands": commands, "page": None if page is None else str(page)})
    elif asked.quote and found.winner is None:
        print("\n".join(sentences), file=sys.stderr)
    elif asked.quote:
        print("\n".join(commands))
    else:
        _show(plain, sentences)
        if limit is not None:
            _show_limit(limit)
        if page is not None:
            print(f"\nwritten to {page}")
    if found.interrupted:
        print("interrupted: this is the plan so far", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if found.winner is None:
        raise typer.Exit(1)


def _tell(page: Path | None, job: Job, until: Mapping[str, float]) -> Callable[[SamplesTrial], None]:
    """Write the trials beside the page, as they come: the live page shows them."""
    target = ", ".join(f"{measure} {goal:g}" for measure, goal in until.items())
    told = SavedTrials(
        title=f"{job.name}: trials of a plan", metric=f"samples to {target}", better="less", num_trials=0
    )
    file = TrialsFile(None if page is None else page.with_suffix(SUFFIX), told)

    def tell(trial: SamplesTrial) -> None:
        settings: dict[str, Setting] = {"strategy": trial.family, "global_batch_size": trial.global_batch}
        settings |= {"workers": trial.workers, "seed": trial.seed}
        why = "" if trial.reached else trial.failed or f"not reached in {trial.samples:,} samples"
        file.ended(settings, float(trial.samples), why)

    return tell


def _space(asked: PlanOptions, job: Job, workers: tuple[int, ...]) -> SearchSpace:
    given: dict[str, Any] = asked.axes
    strategies = usual_strategies(**given) if asked.strategies is None else tuple(split_calls(asked.strategies))
    own = job.batch_size
    batch_sizes = asked.batch_sizes or tuple(sorted({max(1, own // 4), max(1, own // 2), own, 2 * own}))
    return SearchSpace(strategies, workers, batch_sizes)


def _progress() -> tuple[Callable[[str], None], Callable[[], None]]:
    """A line on a terminal that shows progress, and a function that removes it."""
    if not sys.stderr.isatty():
        return (lambda text: None), (lambda: None)

    def show(text: str) -> None:
        print(f"\r{text[:_LINE]:<{_LINE}}", end="", file=sys.stderr, flush=True)

    return show, lambda: print(f"\r{'':<{_LINE}}\r", end="", file=sys.stderr, flush=True)


def _commands(asked: PlanOptions, found: RunPlan, written: Callable[[str], str] = str) -> list[str]:
    """Commands that train the winner, the runner-up and the rest of the front, each once; none without a winner.

    `written`: the data's name as it is to stand there.
    """
    if found.winner is None:
        return []
    best = [found.winner] if found.runner_up is None else [found.winner, found.runner_up]
    until = ",".join(f"{measure}={value:g}" for measure, value in found.until.items())
    data = [] if asked.data is None else ["--data", written(str(asked.data))]
    lines = [
        shlex.join(
            [
                *("polytempo", "train", asked.job, *data, "--workers", str(each.run.workers)),
                *("--strategy", each.run.strategy, "--batch-size", str(each.run.batch_size), "--until", until),
                *(("--balance", "speed") if each.run.balance == "speed" else ()),
            ]
        )
        for each in [*best, *found.front]
    ]
    return list(dict.fromkeys(lines))


def _sentences(found: RunPlan, plain: dict[str, Any]) -> list[str]:
    """The choice, the runner-up, and changes that would turn the choice."""
    winner, second, turned = found.winner, found.runner_up, found.reversal
    names, unit = short_names(plain), money_unit(plain)
    until_then = ["The search was interrupted: this is the plan so far."] if found.interrupted else []
    if winner is None:
        return [_none(found, unit), *until_then]

    def told(forecast: dict[str, Any]) -> str:
        times = [human_seconds(forecast[key]) for key in ("seconds", "low_s", "high_s")]
        workers = f"{plural(forecast['workers'], 'worker')} x {batch_of(forecast)}"
        return (
            f"{names[forecast['strategy']]} on {workers}: {times[0]} "
            f"({times[1]} to {times[2]}), {forecast['money']:.3g} {unit}"
        )

    better = "cheaper" if found.limits.by_price else "faster"
    said = [f"{told(plain['winner'])}.", *until_then]
    if second is None:
        said.append("No other strategy is known to reach the target within the limits.")
    else:
        said.append(f"Runner-up: {told(plain['runner_up'])}. The first is {better} in {found.chance:.0%} of the draws.")
    if turned is not None and second is not None:
        said += _turns(turned, found.limits, names[second.run.strategy])
    return [*said, *_other_limits(found, winner, names, unit), *_too_large(found)]


def _none(found: RunPlan, unit: str) -> str:
    """The reason for a missing winner, and the limits for one."""
    if not found.forecasts:
        return "No trial reached the target; take a nearer one, or give the job more epochs."
    fastest = min(each.seconds for each in found.forecasts)
    cheapest = min(each.money(found.limits.price_per_host_hour) for each in found.forecasts)
    smallest = min(each.memory_bytes for each in found.forecasts)
    return (
        f"No run keeps to the limits: the fastest takes {human_seconds(fastest)}, the cheapest {cheapest:.3g} {unit}, "
        f"the smallest {size(smallest)} of memory a worker."
    )


def _turns(turned: Reversal, limits: PlanLimits, other: str) -> list[str]:
    """Changes that would make `other` the winner."""
    equal = "as cheap" if limits.by_price else "as fast"
    rates = [
        f"{8e-9 * rate:.3g} Gbit/s {which}"
        for rate, which in ((turned.slower_bytes_per_s, "and below"), (turned.faster_bytes_per_s, "and above"))
        if rate is not None
    ]
    said = [f"On no link, from a 64th to 64 times this rate, {other} is {equal}."]
    if rates:
        said = [f"On links of {' or '.join(rates)} {other} is {equal}."]
    if turned.more_samples > 1:
        said.append(
            f"It is {equal} if the first needs {turned.more_samples:.3g} times the samples that are expected of it."
        )
    return said


def _other_limits(found: RunPlan, winner: RunForecast, names: Mapping[str, str], unit: str) -> list[str]:
    """The next cheaper run of the front, and where a budget is given the next faster one."""

    def told(forecast: RunForecast) -> str:
        run = forecast.run
        return f"{names[run.strategy]} on {plural(run.workers, 'worker')} x {batch_of(run._asdict())}"

    said = []
    faster = [each for each in found.front if each.seconds < winner.seconds]
    if found.limits.budget is not None and faster:
        price = faster[-1].money(found.limits.price_per_host_hour)
        said.append(f"With a budget of {price:.3g} {unit}: {told(faster[-1])}, {human_seconds(faster[-1].seconds)}.")
    cheaper = [each for each in found.front if each.host_s < winner.host_s]
    if cheaper:
        less = 1 - cheaper[0].host_s / winner.host_s
        said.append(
            f"{less:.0%} of the price is saved by taking {human_seconds(cheaper[0].seconds)}: {told(cheaper[0])}."
        )
    return said


def _limit(limit: WorkerLimit) -> str:
    """The limit of workers, with the largest cause."""
    end = limit.end
    if not limit.steps:
        return "The limit of workers is unknown: no run of two numbers of workers is known to reach the target."
    if end is None:
        last = limit.steps[-1]
        return (
            f"No limit of workers up to {last.after.run.workers}: from {last.before.run.workers} on they make the run "
            f"{last.brings:.3g} times as fast, for {last.costs:.3g} times the price."
        )
    few, many = end.before, end.after
    return (
        f"The limit is {plural(few.run.workers, 'worker')}: {many.run.workers} are {end.brings:.3g} times as fast, for "
        f"{end.costs:.3g} times the price. The largest cause is {CAUSES[end.reason]} "
        f"({end.factors[end.reason]:.3g} times the seconds)."
    )


def _show_limit(limit: WorkerLimit) -> None:
    print("\nMore workers: the price (seconds of all workers) rises by the product of the causes' factors.")
    rows = [
        (
            f"{step.before.run.workers} to {step.after.run.workers}",
            f"{step.brings:.3g}",
            f"{step.costs:.3g}",
            *(f"{step.factors[cause]:.3g}" for cause in CAUSES),
        )
        for step in limit.steps
    ]
    show_table(("workers", "faster", "dearer", *CAUSES), rows)


def _too_large(found: RunPlan) -> list[str]:
    """Number of runs beyond the limit of memory."""
    most = found.limits.memory_bytes
    count = 0 if most is None else sum(each.memory_bytes > most for each in found.forecasts)
    if most is None or not count:
        return []
    return [f"{count} of {len(found.forecasts)} runs need more than {size(most)} of memory a worker."]


def _show(plain: dict[str, Any], sentences: list[str]) -> None:
    names, unit = short_names(plain), money_unit(plain)
    print("\n".join(sentences))
    rows = [
        (
            *(names[each["strategy"]], str(each["workers"]), batch_of(each)),
            *(human_seconds(each[key]) for key in ("seconds", "low_s", "high_s")),
            *(str(each["hosts"]), f"{each['money']:.3g}"),
        )
        for each in plain["front"]
    ]
    if rows:
        print("\nThe front: no other run is both faster and cheaper.")
        show_table((*_COLUMNS, unit), rows)
    runs, trials = plural(plain["runs"], "run"), plural(len(plain["trials"]), "trial")
    print(f"\nOn {plain['cluster']}: {runs} compared, {trials}, {human_seconds(plain['took_s'])}.")
    if plain["given_up"]:
        print("\nGiven up (too slow, or the target was not reached):")
        for each in plain["given_up"]:
            print(f"- {each['what']}: {each['why']}")
    if plain["left_out"]:
        first = plain["left_out"][0]
        print(f"\nLeft out: {plural(len(plain['left_out']), 'run')}, such as {first['what']}: {first['why']}")
    print("\nNot considered:")
    for sentence in NOT_CONSIDERED:
        print(f"- {sentence}")
