"""States that are duplicated before they are spent, and renewed when parameters come from elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from polytempo.aggregation import mix, push_sum, random_targets, ring_graph
from polytempo.aggregation.outer import MomentumState
from polytempo.core import Bundle, Residual, Transform
from polytempo.core.state import AnchorState, anchors, duplicate, equal, renewed, residual_tensors
from polytempo.synchronization import overlapped
from polytempo.synchronization.every import PeriodState


class Some(NamedTuple):
    step: int
    codecs: dict[str, Residual]


def state(*values: float, step: int = 3) -> Some:
    return Some(
        step, {str(i): Residual(torch.tensor([value])) for i, value in enumerate(values)} | {"none": Residual()}
    )


def test_a_duplicate_is_equal_and_can_be_spent() -> None:
    committed = state(1.0, 2.0)
    spent = duplicate(committed)
    assert equal(spent, committed)
    for residual in residual_tensors(spent):
        residual.add_(5.0)
    assert [float(r) for r in residual_tensors(committed)] == [1.0, 2.0]
    assert not equal(spent, committed)


def test_a_duplicate_uses_memory_that_is_free_where_it_fits() -> None:
    fits, other = torch.zeros(1), torch.zeros(2)
    first, second = residual_tensors(duplicate(state(1.0, 2.0), iter([fits, other])))
    assert first is fits
    assert second is not other
    assert float(fits) == 1.0


def test_a_state_without_residuals_is_not_copied() -> None:
    anchor = Bundle({"w": torch.ones(2)})
    assert duplicate(AnchorState(anchor, PeriodState(3, None))).anchor is anchor


def test_renewed_has_the_new_tensors_at_the_old_step() -> None:
    old = PeriodState(7, AnchorState(Bundle({"w": torch.ones(2)}), MomentumState(Bundle({"w": torch.ones(2)}))))
    new = Bundle({"w": torch.full((2,), 4.0)})
    fresh = PeriodState(0, AnchorState(new, MomentumState(Bundle({"w": torch.zeros(2)}))))
    found = renewed(old, fresh)
    assert found.step == 7
    assert list(anchors(found)) == [new]
    assert not found.inner.inner.velocity.flat.any()


def test_renewed_drops_residuals() -> None:
    found = renewed(state(1.0, step=9), Some(0, {"0": Residual(), "none": Residual()}))
    assert found == Some(9, {"0": Residual(), "none": Residual()})


@pytest.mark.parametrize("transform", [push_sum(random_targets()), overlapped(mix(ring_graph))])
def test_what_gossip_remembers_of_parameters_follows_those_that_are_loaded(transform: Transform) -> None:
    """The anchor `training.hooks.step_hooks.Loaded` notices the loaded parameters."""
    parameters = Bundle({"w": torch.arange(3.0)})
    assert [anchor.flat.tolist() for anchor in anchors(transform.init(parameters))] == [[0.0, 1.0, 2.0]]
