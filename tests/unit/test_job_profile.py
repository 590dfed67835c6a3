"""The estimate of a worker's memory from shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.jobs import find
from polytempo.runs.frame.job_memory import estimated, estimated_stage
from polytempo.spec.job_calls import data_of, model_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.parts.staged_training import cut_of

s = pt.strategies

PARAMETERS = 4 * (64 * 128 + 128 + 128 * 10 + 10)


def test_memory_is_a_sum_of_parts() -> None:
    """digits: SGD with momentum. A residual for the two matrices; gradients travel in a buffer of their own."""
    spec = RunSpec.of(find("digits"), pt.strategies.one_bit_sgd(), 4, RunOptions())
    found = estimated(spec, 1000)
    assert found[:5] == (PARAMETERS, PARAMETERS, PARAMETERS, 0, 1000)
    assert (found.strategy, found.exchanged) == (4 * (64 * 128 + 128 * 10), PARAMETERS)
    assert found.total == found.alone + found.strategy + found.exchanged
    alone = RunSpec.of(find("digits"), pt.strategies.one_bit_sgd(), 1, RunOptions())
    assert estimated(alone, 0)[5:] == (0, 0)


LAYER, KEPT = 4 * (64 * 64 + 64), 4 * 8 * 64
"""Bytes of a layer of `layers`, and of its forward pass's memory for 8 samples."""


def layers() -> pt.Job:
    """Four layers of one size."""
    data = TensorDataset(torch.zeros(32, 64), torch.zeros(32, 64))
    return pt.Job(
        model=lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]),
        data=lambda folder: pt.Data(data, None),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch_size=8,
    )


@pytest.mark.parametrize(
    ("strategy", "workers", "versions", "kept", "exchanged"),
    [
        (s.gpipe(2, 4, recompute=False), 2, 1, 4 / 4, 0),  # of four micro-batches all are held
        (s.one_f_one_b(2, 4), 2, 1, 2 / 4, 0),
        (s.one_f_one_b(2, 4), 4, 1, 2 / 4, 1),  # two replicas exchange the gradients of a stage
        (s.pipedream(2), 2, 2, 2, 0),  # whole batches, each with the version that it began with
    ],
    ids=lambda value: str(value),
)
def test_a_stage_needs_memory_for_its_layers_alone(
    strategy: pt.Strategy, workers: int, versions: int, kept: float, exchanged: int
) -> None:
    """Two of the four layers; the first stage holds the most."""
    spec = RunSpec.of(layers(), strategy, workers, RunOptions())
    found = estimated_stage(spec, cut_of(spec, model_of(spec.job), data_of(spec.job, None)))
    own = 2 * LAYER
    assert found[:3] == (versions * own, own, own)
    assert (found.activations, found.exchanged) == (kept * 2 * KEPT, exchanged * own)


def test_a_stage_that_recomputes_keeps_what_it_is_sent_and_one_micro_batch() -> None:
    spec = RunSpec.of(layers(), s.gpipe(4, 4), 4, RunOptions())
    found = estimated_stage(spec, cut_of(spec, model_of(spec.job), data_of(spec.job, None)))
    assert found[:3] == (LAYER, LAYER, LAYER)
    assert found.activations == 4 * KEPT / 4 + KEPT / 4
