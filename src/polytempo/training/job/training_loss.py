"""A model's loss on its training data as a function of its parameters: `TrainingLoss`, and `PortionLoss` of samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polytempo.large_batch.sharpness import LossSurface
from polytempo.spec.job import Data, Job
from polytempo.spec.loss_divisor import check_by_samples
from polytempo.spec.objective import loss_of
from polytempo.training.job.sample_batches import SampleBatches
from polytempo.training.model.randomness import seed_step

_BATCH = 512


class TrainingLoss:
    """A job's mean loss over its training data, or over so many `samples` of them that are drawn from the seed.

    A call computes it with the parameters of that moment, in parts that add up to it, by their samples (see
    `large_batch.sharpness.Loss`). The model computes in its present mode, and each call draws a data set's random
    numbers again. Errors: ValueError for data without a length.
    """

    def __init__(self, job: Job, model: nn.Module, data: Data, samples: int | None = None, seed: int = 0) -> None:
        self._job, self._model = job, model
        self._batches = SampleBatches(data.train, data.collate, "a measured training loss")
        self.samples = min(samples or self._batches.length, self._batches.length)
        drawn = torch.Generator().manual_seed(seed)
        some = torch.randperm(self._batches.length, generator=drawn)[: self.samples].sort().values
        self._chosen = None if self.samples == self._batches.length else some.tolist()

    def __call__(self) -> Iterator[Tensor]:
        if self._chosen is None:
            batches = self._batches.between(0, self.samples, _BATCH)
        else:
            pieces = [self._chosen[at : at + _BATCH] for at in range(0, self.samples, _BATCH)]
            batches = ((self._batches.taken(piece), len(piece)) for piece in pieces)
        for batch, samples in batches:
            yield loss_of(self._job, self._model, batch) * (samples / self.samples)


class PortionLoss:
    """Parts of a job's mean training loss: all portions add up to it.

    Dropout draws the same for a portion at every point, so the loss is a function. Errors: ValueError for a model with
    batch norms, because an answer to a sample then depends on its portion, and for data without a length.
    """

    def __init__(self, job: Job, model: nn.Module, data: Data, seed: int) -> None:
        norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        if norms:
            raise ValueError(
                "L-BFGS needs a loss that is the sum of its samples', and with batch norms "
                f"({', '.join(norms[:3])}) it depends on which are computed together; use group or layer norms"
            )
        check_by_samples(job.loss, "L-BFGS")
        self._job, self._model, self._seed = job, model.train(), seed
        self._samples = SampleBatches(data.train, data.collate, "training data of L-BFGS")
        self._begin = self._end = 0
        self._surface = LossSurface(self._parts, [each for each in model.parameters() if each.requires_grad])

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self._samples.length

    def here(self) -> Tensor:
        """The model's trained parameters, shape (n,), float64."""
        return self._surface.here()

    def place(self, point: Tensor) -> None:
        """Let the model have these parameters."""
        self._surface.place(point)

    def at(self, point: Tensor, begin: int, end: int) -> tuple[float, Tensor]:
        """The part of the loss, and of its gradient, from the samples `begin` to `end`."""
        self._begin, self._end = begin, end
        seed_step(self._seed, 0, begin, "a portion")
        return self._surface.gradient(point)

    def _parts(self) -> Iterator[Tensor]:
        for batch, samples in self._samples.between(self._begin, self._end):
            yield loss_of(self._job, self._model, batch) * (samples / self.samples)
