"""A job and its samples for rounds of `map_reduce` on Spark and dask: every function is found by name elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import polytempo as pt
from polytempo.interop.averaging_rounds import Averaged

JOB = pt.Job(
    model=partial(nn.Linear, 64, 10, dtype=torch.float64),
    data=pt.jobs.find("digits").data,
    loss=nn.functional.cross_entropy,
    optimizer=torch.optim.Adam,
    lr=0.01,
    batch_size=16,
)


def rows() -> list[tuple[Any, int]]:
    """203 digits: partitions of different sizes, as NumPy arrays."""
    images, labels = pt.data.digits().train.tensors
    return [(image.double().numpy(), int(label)) for image, label in zip(images[:203], labels[:203], strict=True)]


def check(found: Averaged, expected: Averaged) -> None:
    """Parameters and moments agree to 1e-12, and the model has learned."""
    exact = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(found.model.state_dict(), expected.model.state_dict(), **exact)
    states = [each.optimizer.state_dict()["state"] for each in (found, expected)]
    torch.testing.assert_close(*states, **exact)
    assert found.samples == expected.samples == 203
    assert found.losses[-1] < 0.8 * found.losses[0]
