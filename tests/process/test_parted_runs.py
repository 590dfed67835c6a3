"""Whole runs of models in parts on real processes: both worlds, resumed, in other parts, after a worker was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polytempo as pt
from parted_job import classifier, far, job, split, split_text, text_job
from polytempo.core import Strategy
from polytempo.worlds import ProcessWorld
from process.crew import together

pytestmark = pytest.mark.process

s = pt.strategies
STEPS, SAVED = 9, 4
CASES: dict[str, tuple[Strategy, int, pt.Job]] = {
    "split": (split(inner=s.top_k_sgd(0.3, exact_below=0)), 4, job()),
    "split, averaged": (split(inner=s.local_sgd(period=3)), 4, job()),
    "in 8 bits": (split(activations=pt.compression.int8(), gradients=pt.compression.qsgd()), 4, job()),
    "sequence in 8 bits": (split_text(sequence=True, activations=pt.compression.dynamic8()), 2, text_job()),
    "sequence": (split_text(sequence=True), 2, text_job()),
    "hybrid": (s.hybrid("0, 3", inner=s.top_k_sgd(0.3, exact_below=0)), 2, job()),
    "hybrid in 8 bits": (
        s.hybrid("0, 3", "slices", activations=pt.compression.int8(8), gradients=pt.compression.qsgd(127, 8)),
        3,
        job(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_in_the_other_world_to_the_same_bits(case: str, tmp_path: Path) -> None:
    """So both worlds compute the same, a checkpoint holds the whole state, and random draws are repeated."""
    strategy, workers, the_job = CASES[case]
    expected = pt.simulate(the_job, strategy, workers, steps=STEPS, threads=1)
    pt.simulate(the_job, strategy, workers, steps=SAVED, threads=1, out=tmp_path, checkpoint_every=SAVED)
    found = pt.run(the_job, strategy, workers, steps=STEPS, threads=1, out=tmp_path, resume=True)
    assert found.parameters_sha256 == expected.parameters_sha256
    assert (found.loss, found.accuracy) == (expected.loss, expected.accuracy)


def test_a_checkpoint_loads_into_a_plain_module_and_goes_on_in_other_parts(tmp_path: Path) -> None:
    """Three parts become two, then a hybrid with another batch of samples each: momentum follows the names."""
    straight = job()
    expected = pt.simulate(straight, s.sync_sgd(), 1, steps=STEPS, threads=1, out=tmp_path / "one", checkpoint_every=1)
    pt.run(straight, split(3), 3, steps=SAVED, threads=1, out=tmp_path / "parts", checkpoint_every=SAVED)
    found = pt.run(straight, split(2), 2, steps=STEPS, threads=1, out=tmp_path / "parts", resume=True)
    assert far(pt.training.checkpoint_model(tmp_path / "parts"), pt.training.checkpoint_model(tmp_path / "one")) < 1e-12
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    classifier().load_state_dict(pt.training.checkpoint_model(tmp_path / "parts" / "checkpoint"))
    hybrid = pt.run(straight, s.hybrid("0"), 2, steps=STEPS + 2, threads=1, out=tmp_path / "parts", resume=True)
    assert hybrid.steps == STEPS + 2


def test_the_trainer_hands_out_the_whole_model(tmp_path: Path) -> None:
    def work(world: ProcessWorld) -> Any:
        trainer = pt.Trainer(job(), split(2), steps=STEPS, out=tmp_path)
        trainer.fit()
        return [{name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}, str(world.port.mesh)]

    ranks = together(2, work)
    saved = pt.training.checkpoint_model(tmp_path)
    for found, mesh in ranks:
        whole = {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}
        assert all(torch.equal(whole[name], tensor) for name, tensor in saved.items())
        assert mesh == "None"


def test_a_killed_worker_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    calls, once = 0, tmp_path / "killed"

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == SAVED + 2 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(output, target)

    mortal, out = job(loss=loss), tmp_path / "run"
    with pytest.raises(pt.errors.WorkerDied, match="killed by SIGKILL"):
        pt.run(mortal, split(2), 2, steps=STEPS, threads=1, out=out, checkpoint_every=SAVED)
    found = pt.run(mortal, split(2), 2, steps=STEPS, threads=1, out=out, checkpoint_every=SAVED, resume=True)
    assert found.parameters_sha256 == pt.run(mortal, split(2), 2, steps=STEPS, threads=1).parameters_sha256
