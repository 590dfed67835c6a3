"""`polytempo tune batch` on a device: the CPU's decisions for equal times, and batches that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.engines.local_engine import launch
from polytempo.training.tuning import batch_advice
from polytempo.training.tuning.trial import Trial

pytestmark = pytest.mark.process


def job(most: int) -> pt.Job:
    """A job on 128 samples that fits `most` samples at a time into the device's memory."""
    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True) + torch.randn(128, 1, generator=torch.Generator().manual_seed(1))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(output) > most and output.device.type != "cpu":
            raise torch.OutOfMemoryError("out of memory")
        return nn.functional.mse_loss(output, target)

    return pt.Job(
        model=lambda: nn.Linear(4, 1),
        data=lambda folder: pt.Data(TensorDataset(x, y)),
        loss=loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=16,
        lr=0.02,
        epochs=4,
        name="noisy",
    )


def advice(monkeypatch: pytest.MonkeyPatch, where: str, most: int, **options: Any) -> dict[str, Any]:
    """The advice, where a step takes a second and a hundredth for each sample."""

    def step_s(trial: Trial) -> float:
        trial.step()
        return 1 + trial.batch / 100

    monkeypatch.setattr(batch_advice, "_step_s", step_s)

    def work(_: object) -> dict[str, Any]:
        asked = job(most)
        found = batch_advice.advise_batch(asked, asked.data(None), device=torch.device(where), **options)
        plain = found._asdict() | {"samples_per_s": [*found.samples_per_s.items()]}
        return plain | {"noise": [*found.noise], "range": [*found.range], "tried": [[*each] for each in found.tried]}

    [told] = launch(work, 1, threads=1)
    return dict(told)


def test_equal_times_make_the_cpus_decisions(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, expected = (advice(monkeypatch, where, 1000, workers=2) for where in (f"{device}:0", "cpu"))
    if device == "pretend":
        assert found == expected
    else:
        assert found["global_batch_size"] == expected["global_batch_size"]


def test_a_batch_that_does_not_fit_is_computed_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples fit at a time: the noise scale's batch of 16 has 8 parts, and a worker has 2 samples."""
    found, whole = (advice(monkeypatch, f"{device}:0", most, workers=1, extra=4.0) for most in (2, 1000))
    assert [batch for batch, _ in found["samples_per_s"]] == [1, 2]
    assert found["batch_size"] == 2 < whole["batch_size"]
    assert any(f"a batch of 4 does not fit into the memory of {device}:0" in each for each in found["unsure"])
    assert found["noise"] == pytest.approx(whole["noise"])


def test_a_sample_that_does_not_fit_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=f"noisy: a step on a single sample does not fit into the memory of {device}:0"):
        advice(monkeypatch, f"{device}:0", 0)


def test_a_trial_rests_on_the_host_and_goes_on_with_the_same_bits(device: str) -> None:
    def trained(rests: bool) -> list[list[float]]:
        asked = replace(job(1000), optimizer=lambda parameters, lr: torch.optim.Adam(parameters, lr=lr))
        trial = Trial(asked, asked.data(None), batch=16, device=torch.device(f"{device}:0"))
        for _ in range(3):
            trial.step()
            if rests:
                trial.rest()
                state = [v for each in trial.optimizer.state.values() for v in each.values()]
                assert not any(value.numel() for value in trial.model.parameters())
                assert {value.device.type for value in state} == {"cpu"}
        return [[each.loss for each in trial.losses]]

    [told] = launch(lambda _: [trained(rests) for rests in (False, True)], 1, threads=1)
    assert told[0] == told[1]
