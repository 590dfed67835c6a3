"""The job of a checkpoint."""

from __future__ import annotations

from typing import Any

from polytempo import jobs
from polytempo.cli.options.plan import found_job
from polytempo.core.system.url_path import Place
from polytempo.report.runs import has_result, load_result
from polytempo.report.status.stream import ends_of
from polytempo.spec.job import Job
from polytempo.training.observe.saved_model import checkpoint_in, run_of, saved_about


def facts_of(where: Place) -> dict[str, Any]:
    """Job and strategy of a run, by its result, or, of a run that has not ended, by its checkpoint."""
    if has_result(run_of(where)):
        return load_result(run_of(where))
    return dict(saved_about(checkpoint_in(where)))


def saved_job(named: str | None, folder: Place) -> Job:
    """The job that saved `folder`: by its name, if it ships; else the job of --job. ValueError for another one.

    A run's folder may come from a stranger, so no file that it names is imported.
    """
    saved, (start, _) = str(facts_of(folder).get("job")), ends_of(run_of(folder))
    origin = None if start is None else start.origin
    if named is None and (saved not in jobs.names() or origin not in (None, saved)):
        raise ValueError(
            f"{folder} was saved by job {saved!r}, which does not ship; name it: --job "
            f"{origin or 'path/to/file.py:job'}"
        )
    job = found_job(named or saved)
    if job.name != saved:
        raise ValueError(f"{folder} was saved by job {saved!r}, and --job {named} is {job.name!r}; name the same")
    return job
