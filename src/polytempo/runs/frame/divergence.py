"""Results of runs that ended early: something was NaN or infinite, or they were asked to leave."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from polytempo.core import NotFinite
from polytempo.core.system import files
from polytempo.core.system.notice import Preempted
from polytempo.core.system.url_path import Place
from polytempo.report.status.rows import read_metrics
from polytempo.runs.served.run_snapshot import read_run_snapshot
from polytempo.server.snapshots.snapshot import SnapshotError, newest_whole
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec
from polytempo.training.checkpoint.checkpoint_files import read_manifest
from polytempo.training.checkpoint.checkpoint_folders import CheckpointError, latest
from polytempo.training.job.start import start_facts


def diverged_result(spec: RunSpec, error: NotFinite) -> Result:
    """The result of a run up to its last row of metrics, without loss and accuracy; `diverged` says why.

    It is written into the run's folder, if there is one.
    """
    so_far = _so_far(spec)
    steps = so_far.steps if error.step is None else error.step
    result = replace(so_far, steps=steps, loss=None, accuracy=None, train_loss=None, diverged=str(error))
    if spec.options.out is not None:
        result.write(files.run_folder(spec.options.out))
    return result


def left_result(spec: RunSpec, error: Preempted) -> Result:
    """The result of a run that had to leave and saved `error.step`, with its last loss and score."""
    return replace(_so_far(spec), steps=error.step, left=str(type(error)(error.step)))


def _so_far(spec: RunSpec) -> Result:
    options = spec.options
    rows = [] if options.out is None else read_metrics(options.out)
    tested: dict[str, Any] = next((row for row in reversed(rows) if row["kind"] == "test"), {})
    rows = [row for row in rows if row["kind"] == "train"]
    last = rows[-1] if rows else {"step": 0, "epoch": 0.0, "samples": 0, "seconds": 0.0}
    return Result(
        job=spec.job.name,
        strategy=str(spec.strategy),
        world="process",
        workers=spec.workers,
        steps=int(last["step"]),
        epochs=float(last["epoch"]),
        samples=int(last["samples"]),
        seconds=float(last["seconds"]),
        samples_per_s=last["samples"] / last["seconds"] if last["seconds"] else 0.0,
        loss=tested.get("loss"),
        accuracy=tested.get("accuracy"),
        train_loss=last.get("loss"),
        bytes_sent_per_rank=0.0,
        communication_share=0.0,
        batch_size=spec.batch_size,
        seed=spec.seed,
        threads=torch.get_num_threads(),
        parameters_sha256=None,
        trace_hash="",
        started_from=start_facts(options),
    )


def saved_step(spec: RunSpec, out: Place) -> int | None:
    """The last saved step, read from names and manifests; None if nothing is saved."""
    folder = out / "checkpoint"
    with suppress(CheckpointError, SnapshotError, OSError):
        if spec.strategy.server is None:
            newest = latest(folder)
            return None if newest is None else read_manifest(newest).step
        number = newest_whole(folder, spec.strategy.server.shards)
        return None if number is None else read_run_snapshot(folder, number).step
    return None
