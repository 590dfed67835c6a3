"""`TrainingLoss`: the loss of a model on its training data, as a function of its parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from polytempo.spec.job import Data, Job
from polytempo.spec.objective import loss_of
from polytempo.training.job.sample_batches import SampleBatches

_BATCH = 512


class TrainingLoss:
    """A job's mean loss over its training data, or over so many `samples` of them that are drawn from the seed.

    A call computes it with the parameters of that moment, in parts that add up to it, by their samples (see
    `large_batch.points.Loss`). The model is as its mode says, and so are the data: what a data set draws at random,
    each call draws anew. Errors: ValueError for data without a length.
    """

    def __init__(self, job: Job, model: nn.Module, data: Data, samples: int | None = None, seed: int = 0) -> None:
        self._job, self._model = job, model
        self._batches = SampleBatches(data.train, data.collate, "training data whose loss is measured")
        self.samples = min(samples or self._batches.length, self._batches.length)
        drawn = torch.Generator().manual_seed(seed)
        some = torch.randperm(self._batches.length, generator=drawn)[: self.samples].sort().values
        self._chosen = None if self.samples == self._batches.length else some.tolist()

    def __call__(self) -> Iterator[Tensor]:
        """The parts, a batch each."""
        if self._chosen is None:
            batches = self._batches.between(0, self.samples, _BATCH)
        else:
            pieces = [self._chosen[at : at + _BATCH] for at in range(0, self.samples, _BATCH)]
            batches = ((self._batches.taken(piece), len(piece)) for piece in pieces)
        for batch, samples in batches:
            yield loss_of(self._job, self._model, batch) * (samples / self.samples)
