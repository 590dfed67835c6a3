"""Laws of strategies that cut a model into stages: both worlds, observation, interruption, other stages."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.catalogue import STAGED, Row, label
from polytempo.runs import run_page as shown
from polytempo.training.checkpoint_folders import latest

every = pytest.mark.parametrize("row", STAGED, ids=label)


def points(num_samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 4, generator=generator)
    return TensorDataset(x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1))


def model(dropout: float = 0.2) -> nn.Sequential:
    """Batch norm, dropout, and enough layers for six parts."""
    return nn.Sequential(
        *(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout)),
        *(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(dropout), nn.Tanh()),
        *(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)),
    )


def job(*, tested: bool = True, dropout: float = 0.2) -> pt.Job:
    """The last batch of an epoch is short."""
    return pt.Job(
        model=partial(model, dropout),
        data=lambda folder: pt.Data(points(68, 0), points(16, 1) if tested else None),
        loss=nn.functional.mse_loss,
        correct=lambda output, target: (output - target).abs().amax(1) < 0.5,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * steps),
        batch_size=12,
        lr=0.02,
        epochs=2,
    )


class Seen(NamedTuple):
    """What a virtual run did. The trace's hash is over every operation of every rank, with its times."""

    parameters_sha256: str | None
    operations: str
    seconds: float
    steps: int
    train_loss: float | None


def seen(row: Row, workers: int, *, tested: bool = True, **options: Any) -> Seen:
    found = pt.simulate(job(tested=tested), row.make(), workers, threads=1, **options)
    return Seen(found.parameters_sha256, found.trace_hash, found.seconds, found.steps, found.train_loss)


@every
def test_watching_a_pipeline_changes_nothing(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and checkpoints, of two replicas, cost no virtual time and no operation."""
    monkeypatch.setattr(shown, "write_report", lambda *_, **__: None)
    workers = 2 * row.make().stages
    alone = seen(row, workers, tested=False)
    assert seen(row, workers) == alone
    assert seen(row, workers, out=tmp_path, checkpoint_every=2) == alone
    assert latest(tmp_path / "checkpoint") is not None


@every
def test_one_stage_is_the_inner_strategy(row: Row) -> None:
    """To the bit with one micro-batch, but where weights' gradients are computed apart. Dropout has other seeds."""
    strategy = row.make()
    options = {"stages": 1} | ({"micro_batches": 1} if "micro_batches" in str(strategy) else {})
    alone = getattr(pt.strategies, row.name)(**options | ({"parts": 1} if row.name == "interleaved" else {}))
    plain = job(dropout=0.0)
    ours, expected = (pt.simulate(plain, strategy, 1, steps=4) for strategy in (alone, pt.strategies.sync_sgd()))
    assert ours.loss == pytest.approx(expected.loss, rel=1e-5)
    assert row.name == "zero_bubble" or ours.parameters_sha256 == expected.parameters_sha256


def straight_and_resumed(row: Row, out: Path, workers: int, steps: int) -> tuple[pt.Result, pt.Result]:
    """A virtual run of twelve steps, and a real one that goes on from the virtual one's checkpoint of `steps`."""
    straight = pt.simulate(job(), row.make(), workers, steps=12, threads=1)
    pt.simulate(job(), row.make(), workers, steps=steps, threads=1, out=out, checkpoint_every=1)
    return straight, pt.run(job(), row.make(), workers, steps=12, threads=1, out=out, resume=True)


@pytest.mark.process
@every
def test_a_run_that_goes_on_in_the_other_world_ends_with_the_same_bits(row: Row, tmp_path: Path) -> None:
    """So both worlds compute the same, a checkpoint has all that is under way, and what is drawn is drawn again."""
    straight, resumed = straight_and_resumed(row, tmp_path, row.make().stages, 5)
    assert resumed.parameters_sha256 == straight.parameters_sha256
    assert (resumed.loss, resumed.accuracy) == (straight.loss, straight.accuracy)


@pytest.mark.process
def test_a_checkpoint_is_the_whole_model_and_goes_on_in_other_stages(tmp_path: Path) -> None:
    """It loads into a plain module, and momentum goes along by the parameters' names."""
    pt.simulate(job(), pt.strategies.one_f_one_b(3, 2), 3, steps=5, out=tmp_path, checkpoint_every=5)
    folder = latest(tmp_path / "checkpoint")
    assert isinstance(folder, Path)
    state: dict[str, Tensor] = {}
    for part in sorted(folder.glob("rank-*.safetensors")):
        state |= {n.removeprefix("model/"): t for n, t in load_file(part).items() if n.startswith("model/")}
    model().load_state_dict(state)
    resumed = pt.run(job(), pt.strategies.gpipe(2, 2), 2, steps=12, threads=1, out=tmp_path, resume=True)
    straight = pt.simulate(job(), pt.strategies.one_f_one_b(3, 2), 3, steps=12)
    assert resumed.loss == pytest.approx(straight.loss, rel=0.2)


def test_rows_of_metrics_have_the_loss_of_the_last_stage(tmp_path: Path) -> None:
    pt.simulate(job(), pt.strategies.ddg(stages=2), 2, epochs=1, out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[0] is None  # after one step nothing has come back
    assert all(loss is not None for loss in losses[1:])
