"""What `until` asks of a run: a measure on the test set, at which it ends."""

from __future__ import annotations

from polytempo.spec.job import Job
from polytempo.spec.options import RunOptions
from polytempo.training.job.evaluate import Score


def check_goals(job: Job, options: RunOptions, *, has_test: bool) -> None:
    """Raises ValueError where `until` asks for what the job does not measure."""
    if options.until and not has_test:
        raise ValueError("until needs a test set, and this job has none; use epochs or steps")
    if "accuracy" in options.until and job.correct is None:
        raise ValueError("until accuracy=… needs a job with an accuracy, and this one has none; use until loss=…")


def meets(score: Score | None, options: RunOptions) -> bool | None:
    """Whether a score is what `until` asks for; None where it asks for nothing."""
    if not options.until:
        return None
    assert score is not None
    measured = {"loss": -score.loss, "accuracy": score.accuracy or 0.0}
    return all(measured[name] >= (-target if name == "loss" else target) for name, target in options.until.items())
