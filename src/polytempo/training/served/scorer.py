"""`Scorer`: the test score of parameters that other processes train, with a model of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.data.batches import Batches
from polytempo.spec.job import Data, Job
from polytempo.spec.precision import Precision
from polytempo.training.job.evaluate import Evaluation, tensors_of
from polytempo.training.model.randomness import kept_random_states
from polytempo.training.model.running_statistics import Running
from polytempo.training.model.trainable_parameters import trainable


class Scorer:
    """Scores on the test set of `data`, which must have one, in the 16 bits of a `precision`. `model` is the scorer's
    own; `optimizer` holds the trained parameters. It draws no number that others miss, and touches no tensor of theirs.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        batches: Batches,
        model: nn.Module,
        optimizer: Optimizer,
        precision: Precision | None = None,
    ) -> None:
        self._batches, self._model = batches, model
        self._evaluation = Evaluation(job, model, data, precision)
        self._parameters = [parameter.detach() for parameter in trainable(model, optimizer).values()]
        self._running = Running(model)

    @property
    def numel(self) -> int:
        """Elements of the trained parameters."""
        return sum(parameter.numel() for parameter in self._parameters)

    @torch.no_grad()
    def row(self, number: int, seconds: float, flat: Tensor, running: Tensor | None) -> dict[str, Any]:
        """A row of metrics about the snapshot after `number` batches: the parameters `flat`, shape (numel,), and the
        running statistics of norms.
        """
        for parameter, values in zip(
            self._parameters, flat.split([parameter.numel() for parameter in self._parameters]), strict=True
        ):
            parameter.copy_(values.view_as(parameter))
        self._running.place(running)
        with kept_random_states():
            score = self._evaluation.score(tensors_of(self._model))
        batches = self._batches
        samples = batches.samples_before(number)
        return {
            "kind": "test",
            "step": -(-number // batches.size),
            "epoch": samples / batches.num_samples,
            "samples": samples,
            "seconds": seconds,
        } | score.row()
