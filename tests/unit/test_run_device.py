"""The option `device`, on a machine without one: its values, its refusals, and `auto`."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.data.mover import BatchMover
from polytempo.spec.job_calls import move_model
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.model.run_device import run_device, suits_device

JOB = pt.jobs.find("digits")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "xpu", "mps"])
def test_devices_are_named_as_torch_names_them(device: str) -> None:
    assert RunOptions(device=device).device == device


@pytest.mark.parametrize("device", ["", "gpu 1", "cuda:", "cuda:one", "CUDA", "1"])
def test_other_texts_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"device=.*such as cuda or cuda:1"):
        RunOptions(device=device)


REFUSED = {
    "PT1901": ("hogwild()", {}),
    "PT1902": ("sync_sgd()", {"inter_threads": 2}),
}


@pytest.mark.parametrize("code", REFUSED)
def test_features_of_the_cpu_are_refused_on_a_device_and_found_by_auto(code: str) -> None:
    text, options = REFUSED[code]
    strategy = pt.parse_strategy(text)
    with pytest.raises(ValueError, match=f"{code}: device=cuda"):
        RunSpec.of(JOB, strategy, 2, RunOptions(device="cuda", **options))
    spec = RunSpec.of(JOB, strategy, 2, RunOptions(**options))
    assert not suits_device(spec.options, strategy)
    assert run_device(spec.options, strategy) == torch.device("cpu")


def test_a_device_that_is_not_there_is_named_before_workers_start() -> None:
    with pytest.raises(ValueError, match=r"device=xpu:7 is not here: torch sees .*; give device=auto"):
        pt.run("digits", "sync_sgd()", 2, steps=1, device="xpu:7")


def test_tied_parameters_stay_tied() -> None:
    """`meta` makes new parameters, as a device may that torch does not know well."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    move_model(model, torch.device("cpu"))
    assert model[1].weight is model[0].weight
    assert len(list(model.parameters())) == 1


def test_on_the_cpu_batches_are_handed_on() -> None:
    batch = [torch.ones(2), "text"]
    mover = BatchMover(torch.device("cpu"))
    assert mover.moved(batch) is batch
    assert next(iter(mover.ahead(iter([(1, batch)]))))[1] is batch


def test_a_launcher_looks_for_devices_without_using_one() -> None:
    """Else its forked workers could not use it; torch documents the variable for `torch.cuda.is_available`."""
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
