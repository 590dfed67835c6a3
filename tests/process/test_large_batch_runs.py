"""Large batches on real processes: averages of weights, and the optimizers, are resumed to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polytempo as pt
from polytempo.jobs.digits import job
from polytempo.large_batch import LAMB, LARS, cosine, schedule, warm_up
from polytempo.training.checkpoint.checkpoint_files import read_part
from polytempo.training.job.evaluate import AVERAGE
from polytempo.training.observe.saved_model import checkpoint_in

pytestmark = pytest.mark.process

STRATEGIES = [pt.strategies.sync_sgd(), pt.strategies.local_sgd(period=4), pt.strategies.shared_memory()]


def run(strategy: pt.Strategy, out: Path, steps: int, **options: Any) -> pt.Result:
    return pt.run(job, strategy, 2, steps=steps, out=out, threads=1, **options)


def saved(out: Path) -> list[dict[str, Tensor]]:
    """Both ranks' saved states."""
    return [read_part(checkpoint_in(out), rank).tensors for rank in range(2)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_resumed_run_goes_on_with_its_average_to_the_bit(strategy: pt.Strategy, tmp_path: Path) -> None:
    """The weights are a plain run's."""
    whole = run(strategy, tmp_path / "whole", 14, ema=0.9)
    run(strategy, tmp_path / "cut", 6, ema=0.9)
    with pytest.raises(
        pt.errors.WorkerDied, match=r"was saved with ema=0\.9, and this run goes on without a moving average"
    ):
        run(strategy, tmp_path / "cut", 14, resume=True)
    resumed = run(strategy, tmp_path / "cut", 14, ema=0.9, resume=True)
    assert (resumed.loss, resumed.accuracy) == (whole.loss, whole.accuracy)
    for first, second in zip(saved(tmp_path / "whole"), saved(tmp_path / "cut"), strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert any(name.startswith(AVERAGE) for name in saved(tmp_path / "cut")[0])
    plain = run(strategy, tmp_path / "plain", 14)
    assert plain.parameters_sha256 == whole.parameters_sha256
    assert plain.loss != whole.loss


def test_both_worlds_score_the_same_average(tmp_path: Path) -> None:
    strategy = STRATEGIES[1]
    real = run(strategy, tmp_path / "real", 14, ema=0.9)
    virtual = pt.simulate(job, strategy, workers=2, steps=14, threads=1, ema=0.9)
    assert real.loss == pytest.approx(virtual.loss, rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (pt.strategies.sync_sgd(), lambda p, lr: LARS(p, lr, weight_decay=1e-4, trust=0.02, corrects_momentum=True)),
        (pt.strategies.sync_sgd(), lambda p, lr: LAMB(p, lr, weight_decay=1e-4)),
        (pt.strategies.shared_memory(), lambda p, lr: LARS(p, lr, weight_decay=1e-4, trust=0.02)),
        (pt.strategies.shared_memory(), lambda p, lr: LAMB(p, lr, weight_decay=1e-4)),
        (pt.strategies.local_sgd(period=4), lambda p, lr: LAMB(p, lr, weight_decay=1e-4)),
        (pt.strategies.top_k_sgd(0.1), lambda p, lr: LARS(p, lr, weight_decay=1e-4, trust=0.02)),
    ],
    ids=["LARS", "LAMB", "LARS on one copy", "LAMB on one copy", "LAMB, local steps", "LARS, top-k"],
)
def test_lars_and_lamb_are_resumed_to_the_bit(strategy: pt.Strategy, optimizer: Any, tmp_path: Path) -> None:
    """The schedule moves the rate in each step."""
    of = replace(job, optimizer=optimizer, schedule=schedule(warm_up(0.2, start=0.1), cosine(1)), lr=0.05)
    for name, steps in (("whole", (14,)), ("cut", (6, 14))):
        for number, each in enumerate(steps):
            pt.run(of, strategy, 2, steps=each, out=tmp_path / name, resume=number > 0, threads=1)
    for first, second in zip(saved(tmp_path / "whole"), saved(tmp_path / "cut"), strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert any(name.startswith("optimizer/") for name in saved(tmp_path / "cut")[0])


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (pt.strategies.sync_sgd(route=pt.collectives.ring), lambda p, lr: LAMB(p, lr, weight_decay=1e-4)),
        (pt.strategies.local_sgd(period=3, route=pt.collectives.ring), lambda p, lr: LARS(p, lr, trust=0.02)),
        (pt.strategies.top_k_sgd(0.1), lambda p, lr: LARS(p, lr, trust=0.02)),
        (pt.strategies.downpour(lr=0.02, overlap=False), lambda p, lr: LARS(p, lr, trust=0.02)),
    ],
    ids=["synchronous", "local", "compressed", "Downpour"],
)
def test_both_worlds_train_with_a_scaled_rate_and_a_layer_wise_optimizer(strategy: pt.Strategy, optimizer: Any) -> None:
    """Equal bits where workers meet; where they do not, both learn."""
    of = replace(job, optimizer=optimizer, schedule=schedule(warm_up(0.2, start=0.1), cosine(2)), lr=0.05)
    real = pt.run(of, strategy, 2, epochs=1, threads=1)
    virtual = pt.simulate(of, strategy, 2, epochs=1, threads=1)
    if strategy.server is None:
        assert real.parameters_sha256 == virtual.parameters_sha256
    assert max(real.loss, virtual.loss) < 2.2
