"""Whole runs of pipelines with split stages: replicas x stages x parts of layers, in both worlds, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from parted_job import classes, job
from polytempo.core import Codec, Strategy

pytestmark = pytest.mark.process

s = pt.strategies
RULES = ", ".join(f"{layer}: column(gather=True)" for layer in (0, 2, 4))
STEPS = 6


def net() -> nn.Sequential:
    """Seven features, which no number of parts divides; no random draws."""
    layers = [nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5)]
    return nn.Sequential(*layers).double()


def small(**changed: Any) -> pt.Job:
    """The classifier's job with that model, and batches that are all full."""
    data = lambda folder: pt.Data(classes(72, 0), classes(16, 1))  # noqa: E731
    return job(**{"model": net, "data": data, "name": "staged classes", **changed})


def both(stages: int = 2, parts: int = 2, inner: Strategy | None = None) -> Strategy:
    """1F1B over stages with split layers."""
    return s.one_f_one_b(stages, 2, inner=s.split(RULES, parts=parts, inner=inner))


def adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [(both(), 4), (both(), 8), (both(stages=3, parts=3), 9), (s.ddg(2, inner=s.split(RULES)), 4)],
    ids=["2 x 2", "2 x 2 x 2", "3 x 3", "late"],
)
def test_the_virtual_world_trains_it_as_stages_alone(strategy: Strategy, workers: int) -> None:
    schedule, parted = strategy.schedule, strategy.parted
    assert schedule is not None
    assert parted is not None
    alone = s.ddg(2) if "ddg" in str(strategy) else s.one_f_one_b(schedule.stages, 2)
    options: dict[str, Any] = {"steps": STEPS, "threads": 1, "global_batch_size": 12}
    ours = pt.simulate(small(), strategy, workers, **options)
    expected = pt.simulate(small(), alone, workers // parted.ranks, **options)
    assert ours.loss == pytest.approx(expected.loss, rel=1e-12)
    assert ours.train_loss == pytest.approx(expected.train_loss, rel=1e-12)


@pytest.mark.parametrize("codec", [pt.compression.int8(8), pt.compression.qsgd(127, 8)], ids=str)
def test_activations_that_are_computed_anew_are_encoded_to_the_same_bits(codec: Codec) -> None:
    """Random layers draw again, for random states follow the micro-batch."""
    inner = s.split(RULES, activations=codec, gradients=codec)
    stored, anew, plain = (
        pt.simulate(small(), s.gpipe(2, 2, recompute=recompute, inner=each), 4, steps=STEPS, threads=1)
        for recompute, each in ((False, inner), (True, inner), (True, s.split(RULES)))
    )
    assert stored.parameters_sha256 == anew.parameters_sha256 != plain.parameters_sha256
    assert anew.loss == pytest.approx(plain.loss, rel=0.05)


def test_both_worlds_end_with_the_same_bits_and_the_same_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": STEPS, "threads": 1, "checkpoint_every": STEPS}
    real = pt.run(small(), both(), 8, out=tmp_path / "real", **options)
    virtual = pt.simulate(small(), both(), 8, out=tmp_path / "virtual", **options)
    assert real.parameters_sha256 == virtual.parameters_sha256
    saved = [pt.training.checkpoint_model(tmp_path / each) for each in ("real", "virtual")]
    plain = net()
    plain.load_state_dict(saved[0])
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in plain.state_dict())


@pytest.mark.parametrize(
    ("other", "workers"),
    [
        (both(), 4),
        (both(stages=3, parts=2), 6),
        (both(parts=3), 6),
        (s.one_f_one_b(2, 2), 2),
        (s.split(RULES, parts=2), 2),
    ],
    ids=["as it was", "more stages", "more parts", "stages alone", "parts alone"],
)
def test_a_run_goes_on_in_any_division(other: Strategy, workers: int, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    found = pt.run(small(optimizer=adam), other, workers, steps=STEPS, threads=1, out=tmp_path / "run", resume=True)
    whole = pt.simulate(small(optimizer=adam), s.sync_sgd(), 1, steps=STEPS, threads=1)
    assert found.loss == pytest.approx(whole.loss, rel=1e-9)
    assert found.steps == STEPS


@pytest.mark.parametrize(
    ("first", "workers"), [(s.one_f_one_b(2, 2), 2), (s.split(RULES, parts=2), 2)], ids=["stages", "parts"]
)
def test_stages_or_parts_alone_go_on_as_both(first: Strategy, workers: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"threads": 1, "checkpoint_every": 3, "out": tmp_path}
    pt.run(small(optimizer=adam), first, workers, steps=3, **options)
    found = pt.run(small(optimizer=adam), both(), 4, steps=STEPS, resume=True, **options)
    whole = pt.simulate(small(optimizer=adam), s.sync_sgd(), 1, steps=STEPS, threads=1)
    assert found.loss == pytest.approx(whole.loss, rel=1e-9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 3 steps on 2 x 2 workers."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    pt.run(small(optimizer=adam), both(), 4, steps=3, threads=1, out=folder, checkpoint_every=3)
    return folder


@pytest.mark.parametrize(
    ("strategy", "workers", "says"),
    [
        (both(), 6, r"workers=6 cannot be whole models; use workers=8"),
        (s.one_f_one_b(2, 2, inner=s.split("auto")), 4, "cut into stages; give rules by name"),
        (s.one_f_one_b(2, 2, inner=s.split({"4": "vocabulary"})), 4, "the loss of a pipeline gets whole logits"),
        (s.one_f_one_b(2, 2, inner=s.split({"9": "column"})), 4, "9"),
    ],
    ids=["number", "auto", "vocabulary", "unknown"],
)
def test_what_cannot_be_is_refused(strategy: Strategy, workers: int, says: str) -> None:
    for start in (pt.run, pt.simulate):
        with pytest.raises(ValueError, match=says):
            start(small(), strategy, workers, steps=1)
