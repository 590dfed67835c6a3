"""What is said of a run that ended because a loss, a gradient or a parameter was NaN or infinite."""

from __future__ import annotations

import torch

from polytempo.core import NotFinite, files
from polytempo.report.metrics import read_metrics
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec


def diverged_result(spec: RunSpec, error: NotFinite) -> Result:
    """The run in numbers, as far as its last row of metrics tells them, beside runs that came to their end.

    It has no loss and no accuracy, and `diverged` says why. Where the run has a folder, it is left there, too.
    """
    options = spec.options
    path = None if options.out is None else options.out / "metrics.jsonl"
    rows = [
        row for row in (read_metrics(path) if path is not None and path.is_file() else []) if row["kind"] == "train"
    ]
    last = rows[-1] if rows else {"step": 0, "epoch": 0.0, "samples": 0, "seconds": 0.0}
    result = Result(
        job=spec.job.name,
        strategy=str(spec.strategy),
        world="process",
        workers=spec.workers,
        steps=int(last["step"]) if error.step is None else error.step,
        epochs=float(last["epoch"]),
        samples=int(last["samples"]),
        seconds=float(last["seconds"]),
        samples_per_s=last["samples"] / last["seconds"] if last["seconds"] else 0.0,
        loss=None,
        accuracy=None,
        train_loss=None,
        bytes_sent_per_rank=0.0,
        communication_share=0.0,
        batch_size=spec.batch_size,
        seed=spec.seed,
        threads=torch.get_num_threads(),
        parameters_sha256=None,
        trace_hash="",
        diverged=str(error),
    )
    if options.out is not None:
        result.write(files.run_folder(options.out))
    return result
