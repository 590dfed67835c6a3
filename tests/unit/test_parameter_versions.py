"""Versions of parameters: when one is kept and let go, and when autograd's check for overwritten ones stays on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polytempo.training.pipeline.late.parameter_versions import ParameterVersions


def gradient_after_an_update(*, overtaken: bool) -> float:
    """d(w²)/dw of a forward pass at 3, computed after w has been set to 5."""
    weight = nn.Parameter(torch.tensor([3.0]))
    versions = ParameterVersions([weight], stashes=True, overtaken=overtaken)
    with versions.forward(0):
        loss = (weight * weight).sum()
    versions.update_begins()
    if overtaken:
        assert versions.num_versions == 2
    with torch.no_grad():
        weight.copy_(torch.tensor([5.0]))
    loss.backward()
    assert weight.grad is not None
    return float(weight.grad)


def test_a_late_backward_pass_uses_the_parameters_of_its_forward_pass() -> None:
    assert gradient_after_an_update(overtaken=True) == 6.0


def test_a_stage_without_delay_leaves_the_check_to_autograd() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient_after_an_update(overtaken=False)


@pytest.mark.parametrize("stashes", [False, True])
def test_passes_that_are_over_leave_nothing_behind(stashes: bool) -> None:
    """Updates come between each forward pass and its backward pass; version and count go with the pass."""
    weight = nn.Parameter(torch.ones(1))
    versions = ParameterVersions([weight], stashes=stashes)
    for update in range(5):
        with versions.forward(update):
            (weight * 2).sum()
        versions.update_begins()
        assert (versions.num_versions, len(versions._uses)) == (1 + stashes, 1)
        versions.done(update)
        assert (versions.num_versions, len(versions._uses)) == (1, 0)
