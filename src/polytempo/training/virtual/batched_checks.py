"""Checks of a job for `batched`: no pass draws or remembers, and a worker alone has the same gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from polytempo.core import Bundle
from polytempo.spec.job import Job
from polytempo.spec.objective import loss_of
from polytempo.training.model.trainable_parameters import sparse_tables
from polytempo.training.step.guard import Guard

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
_ROUGHLY = 5e-2
"""Largest distance between a batched gradient and the worker's own, as a part of its largest element."""


class PooledGuard(Guard):
    """A guard of a replica that leaves its checks to a common look at all workers."""

    def loss(self, loss: Tensor, step: int, rank: int) -> None:
        """Left to the common look."""

    def gradients(self, step: int, rank: int) -> None:
        """Left to the common look."""

    def bundle(self, bundle: Bundle, step: int, rank: int) -> None:
        """Left to the common look."""


def check_batched(job: Job, model: nn.Module) -> None:
    """ValueError for layers that cannot share passes: they draw random numbers, or remember something."""
    if tables := sparse_tables(model):
        raise ValueError(
            f"job {job.name}: batched: gradients of {', '.join(sorted(tables))} are rows; make the embedding with "
            "sparse=False, or leave out batched"
        )
    for name, module in model.named_modules():
        why = None
        if isinstance(module, _NormBase) and module.track_running_stats and module.training:
            why = "has running statistics; use GroupNorm or track_running_stats=False"
        elif ((isinstance(module, _DropoutNd) and module.p > 0) or isinstance(module, nn.RReLU)) and module.training:
            why = "draws random numbers, which would be others than without batched"
        if why is not None:
            raise ValueError(f"job {job.name}: batched: {type(module).__name__} {name!r} {why}, or leave out batched")


def gradients_alone(
    job: Job, model: nn.Module, trained: Mapping[str, nn.Parameter], batch: object
) -> dict[str, Tensor]:
    """The gradients of one worker, by the names of the parameters that have one."""
    versions = {name: buffer._version for name, buffer in model.named_buffers()}
    loss = loss_of(job, model, batch)
    for name, buffer in model.named_buffers():
        if buffer._version != versions[name]:
            raise ValueError(refusal(job, f"buffer {name!r} changes in a forward pass"))
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(trained, found, strict=True) if gradient is not None}


def compare(job: Job, alone: Mapping[str, Tensor], together: Mapping[str, Tensor]) -> None:
    """ValueError where a worker's gradients are others alone than `together` with others."""
    scale = max(float(gradient.abs().max()) for gradient in alone.values() if gradient.numel())
    for name, gradient in alone.items():
        apart = float((gradient - together[name]).abs().max()) if gradient.numel() else 0.0
        if apart > _CLOSE.get(gradient.dtype, _ROUGHLY) * scale:
            why = f"the gradient of {name!r} is {apart:.2g} away from one worker's alone, up to {scale:.2g} large"
            raise ValueError(refusal(job, why))


def refusal(job: Job, why: str) -> str:
    """The error's text for a model that `torch.func.vmap` refuses, or computes differently."""
    return (
        f"job {job.name}: batched computes the gradients of all workers in one pass (torch.func.vmap), which its model "
        f"or loss does not allow: {why}; leave out batched"
    )


def refused(job: Job, error: Exception) -> ValueError:
    """The error for an exception of `torch.func.vmap`."""
    return ValueError(refusal(job, _first_line(error)))


def _first_line(error: BaseException) -> str:
    seen = list[BaseException]()
    while error.__cause__ is not None and error not in seen:  # torch raises errors that are their own cause
        seen.append(error)
        error = error.__cause__
    return str(error).strip().partition("\n")[0].rstrip(". ")
