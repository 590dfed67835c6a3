"""A rank's gradients in a step of a run's own loop: of a batch, of its pieces or of its slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from polytempo.spec.run_spec import RunSpec
from polytempo.training.hooks.handle import Handle
from polytempo.training.job.distillation import objective_of
from polytempo.training.job.growth import Pieces
from polytempo.training.job.sliced_step import SlicedGradients


def gradients_of(handle: Handle, spec: RunSpec) -> Callable[[Any, int], Tensor]:
    """A function of a batch and a rank that computes gradients and returns the loss; their exchange may have begun."""
    replica = handle.replica
    objective = objective_of(spec.job, replica, spec.strategy.distillation)

    def whole(batch: Any, rank: int) -> Tensor:
        def backward(part: Any, weight: float) -> Tensor:
            loss = objective(part)
            if replica.guard is not None:
                replica.guard.loss(loss, replica.step, rank)
            replica.scaled(loss if weight == 1 else weight * loss).backward()
            return loss

        replica.optimizer.zero_grad()
        return batch.computed(backward, handle.no_sync) if isinstance(batch, Pieces) else backward(batch, 1.0)

    if spec.strategy.slices is None:
        return whole
    gradients = SlicedGradients(replica, spec.job, spec.seed)

    def sliced(batch: Any, rank: int) -> Tensor:
        """Compute slices; their exchange follows the last one."""
        with handle.no_sync():
            return gradients.compute(batch, rank)

    return sliced
