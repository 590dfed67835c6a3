"""What one rank computes in a step of a run's own loop: the gradients of a batch, or of a batch's slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from polytempo.spec.objective import loss_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.handle import Handle
from polytempo.training.sliced_step import SlicedGradients


def gradients_of(handle: Handle, spec: RunSpec) -> Callable[[Any, int], Tensor]:
    """A function of a batch and a rank that computes gradients and returns the loss; their exchange may have begun."""
    replica = handle.replica

    def whole(batch: Any, rank: int) -> Tensor:
        replica.optimizer.zero_grad()
        loss = loss_of(spec.job, replica.model, batch)
        if replica.guard is not None:
            replica.guard.loss(loss, replica.step, rank)
        loss.backward()
        return loss

    if spec.strategy.slices is None:
        return whole
    gradients = SlicedGradients(replica, spec.job, spec.seed)

    def sliced(batch: Any, rank: int) -> Tensor:
        with handle.no_sync():
            return gradients.compute(batch, rank)

    return sliced
