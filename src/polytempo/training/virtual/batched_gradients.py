"""`GradientPool`: the gradients of many workers, each with parameters of its own, in one pass.

    worker 0   W₀, batch₀ ─╮
    worker 1   W₁, batch₁ ─┤▶ one forward and backward pass over (workers, …) tensors ─▶ each worker's `.grad`
    worker 2   W₂, batch₂ ─╯

A worker enrols when its computation begins, and the pool computes when the first enrolled one needs its gradient: until
then none of their parameters change, so each gets the gradient at the parameters that it began with. Workers that are
out of step still share passes, for between two steps of one worker most of the others begin one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from polytempo.spec.job import Job
from polytempo.spec.job_calls import described
from polytempo.training.federated.sample_gradients import ModelLoss
from polytempo.training.observe.user_log import logs_refused
from polytempo.training.step.guard import Guard, first_bad
from polytempo.training.step.replica import Replica
from polytempo.training.virtual.batched_checks import PooledGuard, check_batched, compare, gradients_alone, refused
from polytempo.training.virtual.worker_matrix import WorkerMatrices

MOST_AT_ONCE = 256
"""Workers in one pass: their layers' outputs have to fit into the memory."""
_NO_LOGS = (
    "job {}: it logs in its loss (pt.log), and batched computes all workers' losses in one pass; leave out batched"
)


class Enrolled(NamedTuple):
    """The batch of a worker."""

    tensors: list[Tensor]
    form: tuple[Any, ...]


class GradientPool:
    """Computes the gradients of workers' models of `job` with parameters in `matrices`.

    The first gradient of the first worker is computed alone as well. Parameters that it does not reach stay without a
    gradient, as they do without a pool. ValueError where the two differ, and where `torch.func.vmap` refuses the job.
    """

    def __init__(self, job: Job, matrices: WorkerMatrices) -> None:
        self._job, self._matrices = job, matrices
        self._objective: ModelLoss | None = None
        self._models: dict[int, nn.Module] = {}
        self._replicas: dict[int, Replica] = {}
        self._reached: list[str] = []
        self._unreached: list[str] = []
        self._enrolled: dict[int, Enrolled] = {}
        self._losses: dict[int, Tensor] = {}

    def place(self, worker: int, model: nn.Module) -> None:
        """The model of a worker with parameters in the matrices. ValueError for a model that cannot share passes."""
        if self._objective is None:
            check_batched(self._job, model)
            self._objective = ModelLoss(self._job, model)
        self._models[worker] = model

    def watch(self, worker: int, replica: Replica) -> None:
        """Compute for this replica, and check as its guard does, for all workers together."""
        self._replicas[worker] = replica
        self._matrices.lend(worker, replica)
        if replica.guard is not None:
            replica.guard = PooledGuard(replica.model, replica.trainable)

    def enrol(self, worker: int, batch: Any) -> None:
        """`worker` begins to compute the gradient of `batch` at its present parameters."""
        leaves, structure = leaves_of(batch)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ValueError(
                    f"job {self._job.name}: batched stacks the workers' batches, and theirs hold {described(leaf)} "
                    "beside tensors; let the collate function make tensors of all, or leave out batched"
                )
        form = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        self._enrolled[worker] = Enrolled(leaves, form)

    def loss(self, worker: int) -> Tensor:
        """The loss of the batch that `worker` has enrolled. Its `.grad` are there from now on."""
        if worker in self._enrolled:
            self._compute_all()
        return self._losses.pop(worker)

    def _compute_all(self) -> None:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for worker, enrolled in self._enrolled.items():
            groups.setdefault(enrolled.form, []).append(worker)
        for workers in groups.values():
            for first in range(0, len(workers), MOST_AT_ONCE):
                self._compute(workers[first : first + MOST_AT_ONCE])

    def _compute(self, workers: list[int]) -> None:
        enrolled = [self._enrolled.pop(worker) for worker in workers]
        structure, alone = enrolled[0].form[0], None
        batch = [torch.stack(tensors) for tensors in zip(*(each.tensors for each in enrolled), strict=True)]
        with logs_refused(_NO_LOGS.format(self._job.name)):
            if not self._reached:
                alone = self._alone(workers[0], tree_unflatten(enrolled[0].tensors, structure))
            gradients, losses = self._pass(workers, tree_unflatten(batch, structure))
        if alone is not None:
            compare(self._job, alone, {name: stacked[0] for name, stacked in gradients.items()})
        self._losses |= zip(workers, losses.unbind(0), strict=True)
        self._matrices.write(workers, gradients, self._unreached)
        if self._replicas[workers[0]].guard is not None:
            self._look(workers, gradients, losses)

    def _alone(self, worker: int, batch: Any) -> dict[str, Tensor]:
        trained = self._replicas[worker].trainable
        alone = gradients_alone(self._job, self._models[worker], trained, batch)
        self._reached, self._unreached = list(alone), [name for name in trained if name not in alone]
        return alone

    def _pass(self, workers: Sequence[int], batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients by name, and losses, of `workers`; theirs is the first dimension."""
        objective = self._objective
        assert objective is not None
        parameters = {name: self._matrices.parameter(name, workers) for name in self._reached}

        def loss(parameters: Mapping[str, Tensor], batch: Any) -> Tensor:
            return objective.at(parameters, batch)

        try:
            gradients, losses = vmap(grad_and_value(loss))(parameters, batch)
        except Exception as error:
            raise refused(self._job, error) from error
        return gradients, losses

    def _look(self, workers: Sequence[int], gradients: Mapping[str, Tensor], losses: Tensor) -> None:
        """Raise NotFinite for the first worker with a loss or gradient that is not finite, as its guard does."""
        found = (first_bad([(name, stacked)]) for name, stacked in gradients.items())
        if first_bad([("", losses)]) is None and not any(found):
            return
        for worker in workers:
            replica = self._replicas[worker]
            guard = Guard(replica.model, replica.trainable)
            guard.loss(self._losses[worker], replica.step, worker)
            guard.gradients(replica.step, worker)
            guard.catch_up(worker)


def leaves_of(batch: Any) -> tuple[list[Any], Any]:
    """`tree_flatten` with a short way for a list or tuple of tensors, which nearly all batches are."""
    if type(batch) in (list, tuple) and all(isinstance(each, Tensor) for each in batch):
        return list(batch), _structure(type(batch) is list, len(batch))
    return tree_flatten(batch)


@cache
def _structure(is_list: bool, length: int) -> Any:
    leaves = [0] * length
    return tree_flatten(leaves if is_list else tuple(leaves))[1]
