"""`WorkerMatrices`: parameters of many workers' models as the rows of a matrix, and their gradients likewise.

    parameters   worker 0  [ w2 w2 w2 | b1 | w1 w1 w1 w1 ]        in the buckets' order
                 worker 1  [ w2 w2 w2 | b1 | w1 w1 w1 w1 ]
    parameter("w1", workers)   a window into all rows, shape (workers, 2, 2)

So one pass computes all workers' gradients, and one optimizer step moves them all. A worker's gradients stay in its row
as long as the strategy's answers come back there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from polytempo.core.bundle import by_kind
from polytempo.training.step.bucket import Bucket
from polytempo.training.step.replica import Replica


class WorkerMatrix:
    """Room for the `parameters` of one dtype of `workers` models."""

    def __init__(self, parameters: Mapping[str, Tensor], workers: int) -> None:
        like = next(iter(parameters.values())).detach()
        self.shapes = {name: parameters[name].shape for name in reversed(list(parameters))}
        self.begins: dict[str, int] = {}
        numel = 0
        for name, shape in self.shapes.items():
            self.begins[name] = numel
            numel += shape.numel()
        self.parameters = like.new_zeros(workers, numel)
        self.gradients = like.new_zeros(workers, numel)

    def window(self, matrix: Tensor, name: str) -> Tensor:
        """The part of the rows of `matrix` that belongs to a parameter, in its shape."""
        begin, shape = self.begins[name], self.shapes[name]
        return matrix[:, begin : begin + shape.numel()].unflatten(1, shape) if shape else matrix[:, begin]

    def lent(self, worker: int, names: Sequence[str]) -> Tensor:
        """A worker's gradients of parameters that follow each other here, flat."""
        begin, end = self.begins[names[0]], self.begins[names[-1]] + self.shapes[names[-1]].numel()
        assert end - begin == sum(self.shapes[name].numel() for name in names)
        return self.gradients[worker, begin:end]


class WorkerMatrices:
    """The matrices of `workers` models, one for each dtype."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.by_dtype: list[WorkerMatrix] = []
        self._of: dict[str, WorkerMatrix] = {}
        self._parameters: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._trained: dict[int, dict[str, nn.Parameter]] = {}
        self.num_parameters = 0
        self._lent: dict[int, list[tuple[Bucket, Tensor]]] = {}
        self._elsewhere: set[int] = set()
        """Workers without exchanged gradients that keep gradients outside of their rows."""

    def place(self, worker: int, trained: dict[str, nn.Parameter]) -> None:
        """Move the `trained` parameters of `worker` into its rows."""
        if not self._of:
            for group in by_kind(trained).values():
                matrix = WorkerMatrix(group, self.workers)
                self.by_dtype.append(matrix)
                self._of |= dict.fromkeys(group, matrix)
            self._parameters = {name: each.window(each.parameters, name) for name, each in self._of.items()}
            self._gradients = {name: each.window(each.gradients, name) for name, each in self._of.items()}
        self._trained[worker], self.num_parameters = trained, len(trained)
        for name, parameter in trained.items():
            parameter.data = self._parameters[name][worker].copy_(parameter.detach())

    def lend(self, worker: int, replica: Replica) -> None:
        """Move the gradients of the worker's replica into its rows."""
        self._lent[worker] = []
        for bucket in replica.buckets:
            names = list(bucket.parameters)
            flat = self._of[names[0]].lent(worker, names)
            self._lent[worker].append((bucket, flat))
            bucket.lend(flat)
        if not replica.buckets:
            for name, parameter in self._trained[worker].items():
                parameter.grad = self._gradients[name][worker]

    def parameter(self, name: str, workers: Sequence[int]) -> Tensor:
        """The parameter of these workers, shape (workers, …). A copy where they do not follow each other."""
        return self._parameters[name][_index(workers)]

    def hold_gradients(self, workers: Iterable[int]) -> bool:
        """True if the gradients of all these workers are in their rows."""
        if self._elsewhere:
            return False
        return all(bucket.lies_in(flat) for worker in workers for bucket, flat in self._lent[worker])

    @property
    def one_dtype(self) -> bool:
        """True if there is one matrix alone."""
        return len(self.by_dtype) == 1

    def windows(self, worker: int, like: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """A worker's parameters, each with its window into `like`, which is laid out as the one matrix."""
        for name, parameter in self._trained[worker].items():
            yield parameter, self._of[name].window(like, name)[worker]

    def write(self, workers: Sequence[int], gradients: Mapping[str, Tensor], unreached: Sequence[str]) -> None:
        """Let `gradients`, shape (workers, …), be the workers' `.grad`; parameters that are `unreached` have none."""
        if not unreached and self.hold_gradients(workers):
            index = _index(workers)
            for name, stacked in gradients.items():
                self._gradients[name][index] = stacked
            return
        for name, stacked in gradients.items():
            for worker, gradient in zip(workers, stacked.unbind(0), strict=True):
                self._trained[worker][name].grad = gradient
        for name in unreached:
            for worker in workers:
                self._trained[worker][name].grad = None
        self._elsewhere |= {worker for worker in workers if not self._lent[worker]}


def _index(workers: Sequence[int]) -> slice | Tensor:
    """The index of these rows: a slice if they follow each other."""
    first, count = workers[0], len(workers)
    if list(workers) == list(range(first, first + count)):
        return slice(first, first + count)
    return torch.tensor(workers)
