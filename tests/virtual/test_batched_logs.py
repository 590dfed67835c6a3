"""`pt.log` in a job's loss in simulations with `batched`: one pass computes all workers' losses, so it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor, nn

import polytempo as pt
from polytempo.jobs import find


def number(output: Tensor, target: Tensor) -> Tensor:
    """A number that is not a tensor."""
    pt.log(own=1.0)
    return nn.functional.cross_entropy(output, target)


def tensor(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    found = nn.functional.cross_entropy(output, target)
    pt.log(own=found)
    return found


@pytest.mark.parametrize("loss", [number, tensor])
def test_batched_refuses_and_names_the_option(loss: object, tmp_path: Path) -> None:
    """The loss is computed for all workers in one pass, so rank 0 has no number of its own."""
    job = replace(find("digits"), loss=loss)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave out batched"):
        pt.simulate(job, pt.strategies.local_sgd(period=2), 2, steps=2, out=tmp_path, batched=True)
