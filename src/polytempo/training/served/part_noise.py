"""`PartNoise`: the gradient noise scale as one worker of a parameter server sees it, which meets no other worker.

a batch of b samples    gradient of all of them, which is trained on      ╲
its first quarter       gradient once more, by a copy of the modules      ╱  |G|², tr Σ at this worker's parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.large_batch.noise_scale import NoiseScale, squares
from polytempo.spec.job import Job
from polytempo.spec.job_calls import described, who
from polytempo.spec.objective import loss_of
from polytempo.training.job.evaluate import copied_modules
from polytempo.training.model.randomness import kept_random_states
from polytempo.training.step.noise_watch import KEEPS, noise_row

FEWEST = 3
"""Samples of a batch that has a part to look at."""


class PartNoise:
    """Looks at every `every`-th batch of a worker. Cost: a quarter of a step's computation each time.

    Memory: the model's modules and its buffers once more, and one gradient while it looks.
    """

    def __init__(self, job: Job, model: nn.Module, trainable: Mapping[str, nn.Parameter], *, every: int) -> None:
        self.noise = NoiseScale(KEEPS)
        self._job, self._model, self._trainable, self._every = job, model, trainable, every
        self._copy = copied_modules(model)
        self.sends = True
        """True if it goes with the worker's rows. A virtual world takes it from here: longer messages take time."""

    def look(self, step: int, batch: Any, samples: int) -> None:
        """The gradient of `batch` has been computed: compare it with a part's gradient, at the steps of a look.

        Raises ValueError for a batch with tensors that have not a row for each sample.
        """
        part = max(FEWEST - 1, samples // 4)  # batch norm needs two samples
        if step % self._every or part >= samples:
            return
        with kept_random_states():
            small = self._square(first_samples(self._job, batch, part, samples))
        large = sum(float(torch.linalg.vector_norm(g.to_dense())) ** 2 for g in self._gradients())
        self.noise.add(squares(small, part, large, samples))

    @property
    def row(self) -> dict[str, Any]:
        """Values for rows of metrics."""
        return noise_row(self.noise)

    def _gradients(self) -> list[Tensor]:
        return [p.grad.detach() for p in self._trainable.values() if p.grad is not None]

    def _square(self, batch: Any) -> float:
        """|g|² of another batch, by the copy, which writes to buffers of its own."""
        now = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        own = [*self._copy.named_parameters(), *self._copy.named_buffers()]
        for name, tensor in own:
            tensor.data = now[name].detach() if isinstance(tensor, nn.Parameter) else now[name].clone()
        trained = [parameter for name, parameter in self._copy.named_parameters() if name in self._trainable]
        loss = loss_of(self._job, self._copy, batch)
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        return sum(float(torch.linalg.vector_norm(g.to_dense())) ** 2 for g in found if g is not None)


def first_samples(job: Job, batch: Any, count: int, samples: int) -> Any:
    """The first `count` of a batch's samples. Raises ValueError where a tensor has not a row for each."""
    if isinstance(batch, Tensor) and batch.ndim and len(batch) == samples:
        return batch[:count]
    if isinstance(batch, Mapping):
        return {key: first_samples(job, each, count, samples) for key, each in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return [first_samples(job, each, count, samples) for each in batch]
    raise ValueError(
        f"{who(job)}: the noise scale needs the gradient of a part of a batch, and this one of {samples} samples holds "
        f"{described(batch)}, which has no row for each; leave noise_scale out"
    )
