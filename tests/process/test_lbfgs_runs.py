"""Sandblaster L-BFGS on processes: killed replicas change nothing, and failures are named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import polytempo as pt
from polytempo.jobs.digits import job as digits
from polytempo.report.status.live_status import read_status
from polytempo.report.status.rows import read_metrics
from polytempo.server.lbfgs.operations import Iteration

pytestmark = pytest.mark.process

ITERATIONS = 8


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 10)).double()


def data(path: Path | None) -> pt.Data:
    train, _ = pt.data.digits()
    images, labels = train.tensors
    return pt.Data(torch.utils.data.TensorDataset(images.double(), labels))


def harmful(output: Tensor, target: Tensor, *, after: int, once: Path, how: Callable[[], None]) -> Tensor:
    """The loss; the process that computes it for the `after`-th time comes to harm, if none has before."""
    harmful.calls = getattr(harmful, "calls", 0) + 1  # type: ignore[attr-defined]
    if harmful.calls == after:  # type: ignore[attr-defined]
        try:
            once.touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            how()
    return functional.cross_entropy(output, target)


JOB = replace(digits, model=model, data=data)


def run(of: pt.Job = JOB, **options: Any) -> Any:
    return pt.lbfgs(of, workers=3, shards=2, iterations=ITERATIONS, threads=1, timeout_s=60, **options)


def test_a_killed_replica_changes_neither_losses_nor_parameters(tmp_path: Path) -> None:
    rows: list[Iteration] = []
    out = tmp_path / "run"
    undisturbed = run(on_iteration=rows.append, out=out)
    dies = partial(harmful, after=20, once=tmp_path / "once", how=lambda: os.kill(os.getpid(), signal.SIGKILL))
    disturbed = run(replace(JOB, loss=dies))
    assert (undisturbed.lost, len(disturbed.lost), len(rows)) == ([], 1, ITERATIONS)
    for one, other in zip(undisturbed.iterations, disturbed.iterations, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-10)
    for first, second in zip(undisturbed.model.parameters(), disturbed.model.parameters(), strict=True):
        assert float((first - second).detach().abs().max()) < 1e-10
    assert rows[-1].loss < rows[0].loss / 2
    assert [(row["step"], row["loss"]) for row in read_metrics(out)] == [(row.number, row.loss) for row in rows]
    assert (status := read_status(out)) is not None
    assert (status.job, status.state, status.steps) == (JOB.name, "finished", ITERATIONS)
    assert {path.suffix for path in (out / "logs").iterdir()} == {".log"}


def test_a_job_that_fails_is_named() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("no such loss")

    with pytest.raises(pt.errors.WorkerDied, match=r"worker-\d .*no such loss"):
        run(replace(JOB, loss=loss))


def test_the_last_replica_is_named() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return output

    with pytest.raises(pt.errors.WorkerDied, match=r"worker-\d was killed by SIGKILL"):
        run(replace(JOB, loss=loss))
