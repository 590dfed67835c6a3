"""`PortionLoss`: loss and gradient of some of a job's training samples, at any point."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polytempo.large_batch.points import LossSurface
from polytempo.spec.job import Data, Job
from polytempo.spec.loss_divisor import check_by_samples
from polytempo.spec.objective import loss_of
from polytempo.training.job.sample_batches import SampleBatches
from polytempo.training.model.randomness import seed_step


class PortionLoss:
    """The parts of a job's mean training loss: those of all portions add up to it.

    Dropout draws the same for a portion at every point, so the loss is a function. Errors: ValueError for a model with
    batch norms, whose answers to a sample depend on its portion, and for data without a length.
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
        """How many there are."""
        return self._samples.length

    def here(self) -> Tensor:
        """The model's trained parameters, shape (n,), float64."""
        return self._surface.here()

    def place(self, point: Tensor) -> None:
        """Let the model have these parameters."""
        self._surface.place(point)

    def at(self, point: Tensor, begin: int, end: int) -> tuple[float, Tensor]:
        """The part of the loss, and of its gradient, that the samples from `begin` to `end` have."""
        self._begin, self._end = begin, end
        seed_step(self._seed, 0, begin, "a portion")
        return self._surface.gradient(point)

    def _parts(self) -> Iterator[Tensor]:
        for batch, samples in self._samples.between(self._begin, self._end):
            yield loss_of(self._job, self._model, batch) * (samples / self.samples)
