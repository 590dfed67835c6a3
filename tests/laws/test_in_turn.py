"""Laws of workers that are in step and compute one after the other on one model: the same bits as a model each has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.test_batched import SMALL, WithUnused, adam, falling, groups, made
from laws.test_in_step import EVEN, bad_gradient, bad_loss, trained
from polytempo import strategies as s
from polytempo.core import NotFinite
from polytempo.runs.simulated import simulate
from polytempo.runs.simulated.in_step import groups_in_turn
from polytempo.spec.job import Job
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec


class Each:
    """Switches between one model for many workers and a model each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __iter__(self) -> Iterator[bool]:
        yield True
        self._patch.setattr(simulate, "groups_in_turn", lambda *_: [])
        yield False
        self._patch.undo()


@pytest.fixture
def each(monkeypatch: pytest.MonkeyPatch) -> Each:
    return Each(monkeypatch)


def singles(random: int, samples: int) -> torch.utils.data.TensorDataset:
    inputs, target = made(random, samples).tensors
    return torch.utils.data.TensorDataset(inputs.float(), target)


def odd_sizes() -> nn.Module:
    """float32, and rows with sizes that are not a multiple of the memory's alignment; draws random numbers."""
    return nn.Sequential(nn.Linear(9, 37), nn.Dropout(0.3), nn.GELU(), nn.Linear(37, 5, bias=False))


FLOATS = replace(SMALL, model=odd_sizes, data=lambda _: pt.Data(singles(1, 90), singles(2, 20)))


def image(inputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(inputs, target) + 0.1 * torch.randn(())


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 5)
    )


def two_dtypes() -> nn.Module:
    """The last two parameters of the optimizer are not reached by the loss."""
    model = nn.Sequential(nn.Linear(9, 5), nn.Identity())
    model[1].unused = nn.Linear(2, 2).double()
    return model


@pytest.mark.parametrize("workers", [2, 5, 7, 23])
@pytest.mark.parametrize(
    "job",
    [
        SMALL,
        FLOATS,
        replace(FLOATS, optimizer=adam),
        replace(SMALL, optimizer=groups, schedule=falling),
        replace(FLOATS, model=convolution, loss=image),
        replace(FLOATS, model=two_dtypes, optimizer=adam),
    ],
    ids=["sgd", "floats", "adam", "groups_and_schedule", "convolution", "two_dtypes_unused"],
)
def test_the_bits_are_those_of_a_model_each(job: Job, workers: int, each: Each) -> None:
    told = []
    for shared in each:
        result, parameters, models = trained(job, workers, batched=False, ema=0.9)
        assert models <= 3 if shared else models == 1 + workers
        told.append((result.seconds, result.trace_hash, result.train_loss, result.loss, result.bytes_sent_per_rank))
        told.append(parameters.tolist())
    assert told[:2] == told[2:]


def test_rows_are_the_same(tmp_path: Path, each: Each) -> None:
    rows = []
    for shared in each:
        out = tmp_path / str(shared)
        trained(FLOATS, 4, batched=False, out=out, steps=None, epochs=20, until={"accuracy": 0.9})
        rows.append([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert len(rows[0]) > 3
    assert rows[0] == rows[1]


def test_what_is_not_finite_is_named_as_with_a_model_each(each: Each) -> None:
    data = made(1, 90)
    for row in (37, 39):
        data.tensors[0][row, 0] = 1e6

    linear = replace(SMALL, model=lambda: nn.Linear(9, 5).double(), data=lambda folder: pt.Data(data))
    for loss in (bad_loss, bad_gradient):
        said = []
        for _ in each:
            with pytest.raises(NotFinite) as caught:
                trained(replace(linear, loss=loss), 5, batched=False)
            said.append((caught.value.step, caught.value.rank, caught.value.parameter, str(caught.value)))
        assert said[0] == said[1]


def in_turn(job: Job = SMALL, strategy: Any = None, **options: Any) -> list[range]:
    spec = RunSpec.of(job, strategy or s.sync_sgd(), 6, RunOptions(**{"steps": 4, "batch_size": 3} | options))
    return groups_in_turn(spec, EVEN, job.data(None), job.model())


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(9, 5).double())
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: WithUnused().double(),
        hooked,
        lambda: nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5)).double(),
        lambda: nn.Sequential(nn.Embedding(9, 5, max_norm=1.0)).double(),
        lambda: nn.Sequential(nn.Embedding(9, 5, sparse=True)).double(),
    ],
    ids=["own class", "hook", "running statistics", "renormalized rows", "sparse gradients"],
)
def test_models_that_may_remember_something_are_not_shared(model: Any) -> None:
    assert in_turn() == [range(6)]
    assert in_turn(replace(SMALL, model=model)) == []


@pytest.mark.parametrize("options", [{"noise_scale": 2}, {"batch_growth": {1: 2}}, {"precision": pt.precision("bf16")}])
def test_nor_where_each_workers_gradients_are_looked_at(options: dict[str, Any]) -> None:
    assert in_turn(**options) == []


def test_nor_where_checkpoints_are_asked_for_which_then_are_written_and_change_nothing(tmp_path: Path) -> None:
    """A checkpoint has a model and an optimizer of each worker, so each gets them: as without one model, to the bit."""
    assert in_turn(checkpoint_every=2, out=tmp_path) == []
    told = []
    for options in ({}, {"checkpoint_every": 2}):
        out = tmp_path / str(len(options))
        result, parameters, models = trained(SMALL, 6, batched=False, out=out, **options)
        assert models == (1 + 6 if options else 2)
        assert (result.checkpoint is not None) == bool(options)
        assert (out / "checkpoint").is_dir() == bool(options)
        told.append((result.trace_hash, result.seconds, result.loss, parameters.tolist()))
    assert told[0] == told[1]


def test_nor_where_a_batch_is_cut() -> None:
    assert in_turn(strategy=s.sync_sgd(route=pt.collectives.invariant(6))) == []
