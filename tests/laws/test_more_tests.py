"""Further test sets: runs with such a set as their test set have the same scores, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from laws.combination_runs import points

TRAIN, TEST, NOISY = (points(samples, seed, torch.float64) for seed, samples in enumerate((40, 13, 21)))


def job(test: Any = TEST, more: Any = {}) -> pt.Job:  # noqa: B006  # read only
    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double(),
        data=lambda folder: pt.Data(TRAIN, test, more=more),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        correct=lambda output, target: output.argmax(1) == target.argmax(1),
        batch_size=4,
        lr=0.05,
    )


STRATEGIES = ("sync_sgd()", "local_sgd(period=3)", "gpipe(stages=2)", "downpour()", "hogwild(update='atomic')")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("start", [pt.simulate, pytest.param(pt.run, marks=pytest.mark.process)])
def test_a_further_set_has_the_scores_of_a_test_set(strategy: str, start: Any) -> None:
    if start is pt.run and "hogwild" in strategy:
        return  # in any order
    given: dict[str, Any] = {"workers": 2, "steps": 7, "threads": 1}
    if start is pt.run and "downpour" in strategy:
        given["workers"] = 1
    found = start(job(more={"noisy": NOISY}), strategy, **given)
    alone, instead = start(job(), strategy, **given), start(job(test=NOISY), strategy, **given)
    assert (found.loss, found.accuracy, found.parameters_sha256) == (
        alone.loss,
        alone.accuracy,
        alone.parameters_sha256,
    )
    assert found.metrics == {
        "noisy/loss": pytest.approx(instead.loss, rel=1e-12),
        "noisy/accuracy": pytest.approx(instead.accuracy),
    }


def test_rows_have_them(tmp_path: Path) -> None:
    found = pt.simulate(job(more={"noisy": NOISY}), "sync_sgd", workers=2, epochs=2, out=tmp_path)
    assert found.metrics is not None
    assert found.history.of("test").column("noisy/loss")[-1] == found.metrics["noisy/loss"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"a/b": NOISY}, "another name"),
        ({"": NOISY}, "another name"),
        ({"noisy": []}, "with samples"),
        ([NOISY], "a dict"),
    ],
)
def test_mistakes(more: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pt.simulate(job(more=more), "sync_sgd", workers=2, steps=1)
