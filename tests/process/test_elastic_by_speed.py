"""`balance="speed"` in elastic runs: strategies that deal by speed train as without elasticity, others are refused."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polytempo as pt
from laws.catalogue import ROWS, Row, label
from laws.test_balance import BY_SAMPLES, any_shares, plain_by_samples, refusal
from laws.test_batch_weights import BATCH, STEPS, check, simulated
from laws.test_elastic_laws import taken
from polytempo.core.calls.refusals import Incompatible
from polytempo.report.status.records import TrainRow
from polytempo.report.status.stream import stream
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.hooks import speed_balance

pytestmark = pytest.mark.process

TAKEN = [row for row in ROWS if taken(row)]
DEALT = [row for row in TAKEN if refusal(row) is None]


@pytest.fixture(autouse=True)
def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other parts in each step."""
    monkeypatch.setattr(speed_balance, "EVERY", 1)
    monkeypatch.setattr(speed_balance, "next_shares", any_shares)


def elastic(job: pt.Job, row: Row, folder: Path) -> dict[str, Tensor]:
    given: dict[str, Any] = {"global_batch_size": BATCH, "steps": STEPS, "threads": 1, "checkpoint_every": STEPS}
    pt.run(job, row.make(), 2, min_workers=1, balance="speed", out=folder, **given)
    rows = [record for record in stream(folder) if isinstance(record, TrainRow)]
    assert any(row.more["smallest_part"] < row.more["largest_part"] for row in rows)
    found: dict[str, Tensor] = pt.training.checkpoint_model(folder)
    return found


@pytest.mark.parametrize("row", DEALT, ids=label)
def test_parts_by_speed_train_as_without_elasticity(row: Row, tmp_path: Path) -> None:
    found = elastic(BY_SAMPLES, row, tmp_path / "elastic")
    check(found, simulated(BY_SAMPLES, row.make(), 2, tmp_path / "fixed", balance="speed"))


@pytest.mark.parametrize("row", [row for row in DEALT if row.joined], ids=label)
def test_a_worker_that_is_lost_and_replaced_changes_nothing(row: Row, tmp_path: Path) -> None:
    """A worker kills itself in its fourth loss; the others have its part of that step, and deal with its successor."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls == 4:
            try:
                os.close(os.open(tmp_path / "dead", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return BY_SAMPLES.loss(output, target)  # type: ignore[no-any-return]
            os.kill(os.getpid(), signal.SIGKILL)
        return BY_SAMPLES.loss(output, target)  # type: ignore[no-any-return]

    check(elastic(replace(BY_SAMPLES, loss=loss), row, tmp_path / "run"), plain_by_samples())
    assert (tmp_path / "dead").exists()


@pytest.mark.parametrize("row", [row for row in TAKEN if refusal(row) is not None], ids=label)
def test_others_are_refused_with_the_code_of_a_fixed_run(row: Row) -> None:
    options = RunOptions(min_workers=1, balance="speed", global_batch_size=BATCH, steps=STEPS)
    code = refusal(row)
    assert code is not None
    with pytest.raises(Incompatible, match=code):
        RunSpec.of(BY_SAMPLES, row.make(), 2, options)
