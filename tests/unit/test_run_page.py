"""A run's output while it goes on: its rows as progress towards a known end."""

from __future__ import annotations

import io
from typing import Any

import pytest

from polytempo.jobs.digits import job
from polytempo.report.status.progress import Progress
from polytempo.runs.frame.run_page import show_rows
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.strategies import sync_sgd


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RunOptions(), "step 40, loss 0.5, accuracy 97.0 %, 100 samples/s, about 52 s left"),  # 15 epochs by the job
        (RunOptions(epochs=10), "step 40, loss 0.5, accuracy 97.0 %, 100 samples/s, about 32 s left"),
        (RunOptions(steps=80), "step 40/80, loss 0.5, accuracy 97.0 %, 100 samples/s, about 8 s left"),
        (RunOptions(steps=80, epochs=3), "step 40/80, loss 0.5, accuracy 97.0 %, 100 samples/s, about 4 s left"),
        (
            RunOptions(epochs=10, until={"accuracy": 0.99}),
            "step 40, loss 0.5, accuracy 97.0 %, 100 samples/s, at most 32 s left",
        ),
    ],
    ids=["the job's epochs", "epochs", "steps", "whichever comes first", "until"],
)
def test_progress_says_when_the_run_ends(options: RunOptions, said: str) -> None:
    stream, now = io.StringIO(), [0.0]
    progress = Progress(stream, lambda: now[0])
    train: dict[str, Any] = {"kind": "train", "loss": 0.5, "samples_per_s": 100.0}
    with show_rows(progress, RunSpec.of(job, sync_sgd(), 2, options), "virtual ") as show:
        show({"kind": "test", "accuracy": 0.97})
        show(train | {"step": 20, "epoch": 1.0})
        now[0] = 4.0
        show(train | {"step": 40, "epoch": 2.0})
    assert stream.getvalue().splitlines() == [
        "digits, sync_sgd(route=native), 2 virtual workers: started",
        f"digits, sync_sgd(route=native), 2 virtual workers: {said}",
    ]
