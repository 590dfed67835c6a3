"""`eval_every`: the steps with a score, in every kind of run. `test_observation` shows that scores change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from laws.combination_runs import points
from polytempo.report.status import records
from polytempo.report.status.stream import stream
from polytempo.spec.run_options import ScoreInterval, interval_of

JOB = pt.Job(
    model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
    data=lambda folder: pt.Data(points(40, 0, torch.float32), points(16, 1, torch.float32)),
    loss=nn.functional.mse_loss,
    optimizer=torch.optim.SGD,
    lr=0.05,
    batch_size=4,
)
"""Two workers make five steps an epoch, and stages of one model ten."""


def scored_steps(out: Path) -> list[int]:
    return [record.step for record in stream(out) if isinstance(record, records.TestRow)]


@pytest.mark.parametrize(
    ("strategy", "every", "expected"),
    [
        ("sync_sgd()", None, [5, 10]),
        ("sync_sgd()", 3, [3, 6, 9, 10]),
        ("sync_sgd()", "0.5 epochs", [3, 5, 8, 10]),
        ("sync_sgd()", "2 epochs", [10]),
        ("local_sgd(period=4)", 3, [3, 6, 9, 10]),
        ("hogwild(update='atomic')", 3, [3, 6, 9, 10]),
        ("gpipe(stages=2)", "0.3 epochs", [3, 6, 9, 12, 15, 18, 20]),
        ("pipedream(stages=2)", 7, [7, 14, 20]),
        ("split('0: column, 2: row', parts=2)", 7, [7, 14, 20]),
        ("backup_workers(backups=0)", 3, [3, 6, 9, 10]),
        ("downpour()", "0.5 epochs", [3, 5, 8, 10]),
    ],
)
def test_the_steps_with_a_score(strategy: str, every: int | str | None, expected: list[int], tmp_path: Path) -> None:
    pt.simulate(JOB, strategy, 2, epochs=2, threads=1, eval_every=every, out=tmp_path)
    assert scored_steps(tmp_path) == expected


@pytest.mark.parametrize(
    ("given", "expected", "text"),
    [
        (50, ScoreInterval(50, "steps"), "50"),
        ("50", ScoreInterval(50, "steps"), "50"),
        ("1 step", ScoreInterval(1, "steps"), "1"),
        ("0.1 epochs", ScoreInterval(0.1, "epochs"), "0.1 epochs"),
        ("1 epoch", ScoreInterval(1, "epochs"), "1.0 epochs"),
    ],
)
def test_an_interval_and_its_text(given: int | str, expected: ScoreInterval, text: str) -> None:
    found = interval_of(given)
    assert (found, str(found), interval_of(str(found))) == (expected, text, expected)


@pytest.mark.parametrize("given", [0, -3, 1.5, True, "often", "3 days", "0 epochs", "nan", "inf epochs", "", "3 4 5"])
def test_an_interval_is_of_steps_or_epochs(given: Any) -> None:
    with pytest.raises(ValueError, match=r"eval_every=.*must be a number of steps, such as 50, or of epochs"):
        pt.simulate(JOB, "sync_sgd()", eval_every=given)


def test_scores_need_a_test_set() -> None:
    with pytest.raises(ValueError, match="eval_every needs a test set"):
        pt.simulate(replace(JOB, data=lambda folder: pt.Data(points(40, 0, torch.float32))), "sync_sgd()", eval_every=3)


def test_a_tenth_of_an_epoch_ten_times() -> None:
    """Sums of tenths are not whole, and each counts once."""
    tenth, steps = ScoreInterval(0.1, "epochs"), 30
    due = [step for step in range(1, 2 * steps + 1) if tenth.is_due(step, (step - 1) / steps, step / steps)]
    assert due == list(range(3, 2 * steps + 1, 3))


def test_a_goal_is_looked_at_within_an_epoch() -> None:
    assert pt.simulate(JOB, "sync_sgd()", 2, epochs=2, eval_every=2, until={"loss": 1e9}).steps == 2


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("sync_sgd()", {}, [3, 6, 9, 10]),
        ("sync_sgd()", {"min_workers": 1}, [3, 6, 9, 10]),
        ("gpipe(stages=2)", {}, [3, 6, 9, 12, 15, 18, 20]),
    ],
    ids=str,
)
def test_processes(strategy: str, options: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    """A run that is broken off within an epoch and resumed has the scores of an undisturbed run."""
    given = {"threads": 1, "eval_every": 3, "out": tmp_path, "epochs": 2, **options}
    pt.run(JOB, strategy, 2, steps=7, **given)
    found = pt.run(JOB, strategy, 2, resume=True, **given)
    once = pt.run(JOB, strategy, 2, epochs=2, threads=1, **options)
    assert (found.parameters_sha256, found.loss) == (once.parameters_sha256, once.loss)
    assert set(scored_steps(tmp_path)) == {*expected, 7}


@pytest.mark.process
def test_processes_with_a_server(tmp_path: Path) -> None:
    """An evaluator that is slower than training leaves some out."""
    pt.run(JOB, "backup_workers(backups=0)", 2, epochs=2, threads=1, eval_every=3, out=tmp_path)
    found = scored_steps(tmp_path)
    assert set(found) <= {3, 6, 9, 10}
    assert found[-1] == 10
