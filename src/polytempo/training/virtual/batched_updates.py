"""`UpdatePool`: the optimizer steps of many workers as one step of one optimizer.

all workers, in step    an optimizer with one parameter, the matrix of all workers' parameters (`StackedOptimizer`)
some of them            an optimizer that has all their parameters, each with the state that its own optimizer keeps
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polytempo.training.virtual.worker_matrix import WorkerMatrices

_BY_ELEMENT = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)
"""Optimizers that treat each number alone. Other workers' optimizers make their steps one after the other."""


class UpdatePool:
    """Makes the steps of workers' optimizers when the first enrolled one needs its own.

    `varies`: a schedule changes hyper-parameters, so that workers out of step have others.
    """

    def __init__(self, matrices: WorkerMatrices, *, varies: bool) -> None:
        self._matrices, self._varies = matrices, varies
        self._optimizers: dict[int, Optimizer] = {}
        self._owner: dict[Tensor, Optimizer] = {}
        self._enrolled: dict[int, None] = {}
        self._stacked: StackedOptimizer | None = None
        self._stacks = True

    def place(self, worker: int, optimizer: Optimizer) -> None:
        """Note the optimizer of `worker`."""
        self._optimizers[worker] = optimizer
        for group in optimizer.param_groups:
            self._owner |= dict.fromkeys(group["params"], optimizer)

    def enrol(self, worker: int) -> None:
        """`worker` begins its step, with the gradients that it has now."""
        self._enrolled[worker] = None

    def make(self, worker: int) -> None:
        """The step of `worker` is made."""
        if worker not in self._enrolled:
            return
        alike: dict[Any, list[int]] = {}
        for each in self._enrolled:
            alike.setdefault(_settings(self._optimizers[each]) if self._varies else None, []).append(each)
        self._enrolled = {}
        for workers in alike.values():
            self._step([self._optimizers[each] for each in workers])

    def _step(self, optimizers: list[Optimizer]) -> None:
        if type(optimizers[0]) not in _BY_ELEMENT or any(map(_has_hooks, optimizers)):
            for optimizer in optimizers:
                optimizer.step()
        elif self._in_step(optimizers):
            if self._stacked is None:
                self._stacked = StackedOptimizer(self._optimizers, self._matrices)
            self._stacked.step()
        else:
            if self._stacked is not None:
                self._stacked.release()
            self._stacked, self._stacks = None, False
            _merged_step(optimizers, self._owner)

    def _in_step(self, optimizers: list[Optimizer]) -> bool:
        """True if these are all workers', they have made their steps together so far, and one matrix holds it all."""
        whole = self._stacks and len(optimizers) == self._matrices.workers and self._matrices.one_dtype
        groups = optimizers[0].param_groups
        if not whole or len(groups) > 1 or len(groups[0]["params"]) != self._matrices.num_parameters:
            return False
        fresh = self._stacked is not None or not any(optimizer.state for optimizer in optimizers)
        return fresh and self._matrices.hold_gradients(self._optimizers)


class StackedOptimizer:
    """All workers' optimizers as one, of the matrix of their parameters. They hold windows of its state."""

    def __init__(self, optimizers: Mapping[int, Optimizer], matrices: WorkerMatrices) -> None:
        self._optimizers, self._matrices = optimizers, matrices
        self._first = optimizers[0]
        self._optimizer = copy(self._first)
        self._optimizer.state = defaultdict(dict)
        self._matrix = matrices.by_dtype[0].parameters
        self._matrix.grad = matrices.by_dtype[0].gradients

    def step(self) -> None:
        """One step of all workers."""
        self._optimizer.param_groups = [{**self._first.param_groups[0], "params": [self._matrix]}]
        type(self._optimizer).step(self._optimizer)  # a schedule may have bound `step` to the first worker's
        if self._optimizer.state and not self._first.state:
            self._publish(self._optimizer.state[self._matrix])

    def _publish(self, state: Mapping[str, Any]) -> None:
        """Let the workers' optimizers hold windows of the state. Counts of steps are one tensor for all."""
        for key, value in state.items():
            for worker, optimizer in self._optimizers.items():
                of_rows = isinstance(value, Tensor) and value.ndim > 0
                for parameter, window in self._matrices.windows(worker, value if of_rows else self._matrix):
                    optimizer.state[parameter][key] = window if of_rows else value

    def release(self) -> None:
        """Let each optimizer count its own steps again."""
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                counts = {k: v.clone() for k, v in state.items() if isinstance(v, Tensor) and not v.ndim}
                state.update(counts)


def _merged_step(optimizers: list[Optimizer], owner: Mapping[Tensor, Optimizer]) -> None:
    """One step of an optimizer that has the parameters of all of these."""
    merged = copy(optimizers[0])
    merged.state = _States(owner)
    merged.param_groups = [
        {
            **same[0],
            "params": [parameter for group in same for parameter in group["params"]],
            "foreach": not same[0].get("fused"),
        }
        for same in zip(*(optimizer.param_groups for optimizer in optimizers), strict=True)
    ]
    type(merged).step(merged)


class _States(defaultdict[Tensor, dict[str, Any]]):
    """The state of each parameter, as its own optimizer keeps it."""

    def __init__(self, owner: Mapping[Tensor, Optimizer]) -> None:
        super().__init__()
        self._owner = owner

    def __missing__(self, parameter: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = self._owner[parameter].state[parameter]
        return found


def _settings(optimizer: Optimizer) -> tuple[Any, ...]:
    """The settings that optimizers must share to make one step."""
    return tuple(
        (key, float(value) if isinstance(value, Tensor) else value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "params"
    )


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
