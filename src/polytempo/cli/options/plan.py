"""Parts that `train`, `compare` and `simulate` have in common, from options to runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from polytempo import jobs
from polytempo.cli.options.folder import TRACES_OF_A_RUN
from polytempo.cli.options.show import show_json, show_table
from polytempo.core import Strategy
from polytempo.core.system.url_path import UrlPath
from polytempo.runs.frame.arguments import check_workers
from polytempo.spec.job import Job
from polytempo.spec.job_calls import not_read
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec


def found_job(text: str) -> Job:
    """`jobs.find`; an error in the job's file comes with its own lines."""
    try:
        return jobs.find(text)
    except Exception as error:
        raise not_read(text, error) from error


def check_url(options: RunOptions) -> None:
    """ValueError where the run's folder is a URL that cannot be listed, or holds a run that is not resumed."""
    if not isinstance(out := options.out, UrlPath):
        return
    try:
        held = set(out.names()).intersection(TRACES_OF_A_RUN)
    except OSError as error:
        raise ValueError(f"--out {out}: it cannot be listed ({error.strerror}); name another place") from error
    if held and not options.resume:
        raise ValueError(f"--out {out}: this place holds a run; continue it with --resume, or name another one")


def show_plan(
    job: Job, strategies: Sequence[Strategy], world: str, workers: int, options: RunOptions, *, as_json: bool
) -> None:
    """Print the run as it would begin, with the job's own values where none are given. ValueError where it cannot."""
    for strategy in strategies:
        check_workers(strategy, workers)
        RunSpec.of(job, strategy, workers, options)
    taken = asdict(options)
    if options.global_batch_size is not None:
        taken.pop("batch_size")
    own = {key: getattr(job, key) for key in ("epochs", "batch_size", "lr") if taken.get(key, options) is None}
    taken["trackers"] = [str(each) for each in options.trackers]
    texts = {key: str(getattr(options, key)) for key in ("data", "out", "precision") if taken[key] is not None}
    plan: dict[str, object] = {
        "job": job.name,
        "strategies": [strategy.name for strategy in strategies],
        "world": world,
        "workers": workers,
        **taken,
        **own,
        **texts,
    }
    if as_json:
        show_json(plan)
    else:
        said = {key: value for key, value in plan.items() if value not in (None, {}, [])}
        said["strategies"] = ", ".join(strategy.name for strategy in strategies)
        said |= {"trackers": ", ".join(taken["trackers"])} if taken["trackers"] else {}
        show_table(("", ""), [(key, str(value)) for key, value in said.items()], header=False)
