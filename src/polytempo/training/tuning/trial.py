"""`Trial`: a job trained in this process for as many samples as one likes, on the batch that all workers would share.

Synchronous SGD on N workers with b samples each computes the gradient of N·b samples, so one process can try it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core.bundle import pack
from polytempo.data.shard import DataShard
from polytempo.device import HOST
from polytempo.large_batch.noise_scale import Squares, of_workers, sketch
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import schedule_of
from polytempo.spec.objective import loss_of, part_weights
from polytempo.spec.rates.plateau import Plateau
from polytempo.spec.rates.schedules import has_ended
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.strategies import sync_sgd
from polytempo.training.job.evaluate import Evaluation, tensors_of
from polytempo.training.job.sliced_step import BatchSlice, next_slices
from polytempo.training.job.start import replica_of
from polytempo.training.model.randomness import seed_step
from polytempo.training.model.run_device import beside, on_device, synchronize


class TrialLoss(NamedTuple):
    """The mean loss of one step's samples, before the step."""

    samples: int
    """Trained on when the step was over."""
    loss: float


def exceeds(loss: float, other: float, part: float) -> bool:
    """True if `loss` is above `other` by more than such a part of it; losses may be negative."""
    return loss > other + part * abs(other)


class Trial:
    """A run of `job` on batches of `batch` samples. `lr` None: the job's own.

    `parts`: computed parts of a batch, for an estimate of the noise scale; 1: the whole, without an estimate.
    `follows`: the job's schedule moves the rate. `device`: of the model and its batches; its memory may be too small
    (`torch.OutOfMemoryError`).

    Memory: a model, its optimizer and, with parts, another gradient; after `rest` it is the host's.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        *,
        batch: int,
        lr: float | None = None,
        seed: int = 0,
        parts: int = 1,
        follows: bool = True,
        device: torch.device = HOST,
    ) -> None:
        spec = RunSpec.of(job, sync_sgd(), 1, RunOptions(global_batch_size=batch, lr=lr, seed=seed))
        spec = on_device(spec, device)
        self.job, self.batch, self.lr, self._seed, self._device = spec.job, batch, spec.lr, seed, device
        self.model, self.optimizer = replica_of(spec, device)
        self._shard = DataShard(
            data.training(), rank=0, size=1, seed=seed, global_batch_size=batch, slices=min(parts, batch)
        )
        self._scheduler = schedule_of(self.job, self.optimizer, len(self._shard)) if follows else None
        self._batches: Iterator[Any] = iter(self._shard)
        self._evaluation = None if data.test is None else Evaluation(self.job, self.model, data)
        self._resting: list[Tensor] | None = None
        """The model's tensors on the host, while it rests."""
        self._away: list[tuple[dict[Any, Any], Any]] = []
        """The optimizer's tensors that rest there: a parameter's state, and a name in it."""
        self.steps = self.samples = 0
        self.losses: list[TrialLoss] = []
        self.noise: list[Squares] = []
        """The estimates of each step that had parts."""

    @property
    def diverged(self) -> bool:
        """True if the last loss was not finite."""
        return bool(self.losses) and not math.isfinite(self.losses[-1].loss)

    def train(self, samples: int) -> None:
        """Go on for so many samples, or until the loss is not finite."""
        end = self.samples + samples
        while self.samples < end and not self.diverged:
            self.step()

    def rest(self) -> None:
        """Leave the device's memory to others, up to the next step."""
        if self._device.type == HOST.type or self._resting is not None:
            return
        self.optimizer.zero_grad()
        self._resting = [tensor.detach().to(HOST) for tensor in self._tensors()]
        for tensor in self._tensors():
            tensor.data = tensor.new_empty(0)
        states = list(self.optimizer.state.values())
        self._away = [(state, name) for state in states for name, value in state.items() if self._is_there(value)]
        for state, name in self._away:
            state[name] = state[name].to(HOST)

    def _wake(self) -> None:
        if self._resting is None:
            return
        for tensor, resting in zip(self._tensors(), self._resting, strict=True):
            tensor.data = resting.to(self._device)
        for state, name in self._away:
            state[name] = state[name].to(self._device)
        self._resting, self._away = None, []

    def _tensors(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _is_there(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.device == self._device

    def step(self) -> float:
        """One step, up to its end on the device; the mean loss of its samples."""
        self._wake()
        pieces = next_slices(self.job, self._shard, self._batches, self._seed, self.steps)
        if pieces is None:
            self._batches = iter(self._shard)
            pieces = next_slices(self.job, self._shard, self._batches, self._seed, self.steps)
            assert pieces is not None, "an epoch has samples"
        seed_step(self._seed, 0, self.steps, "model")
        loss = self._whole(pieces[0]) if len(pieces) == 1 else self._in_parts(pieces)
        self.optimizer.step()
        synchronize(self._device)
        own = None if isinstance(self._scheduler, Plateau) else self._scheduler  # scores are not of a trial
        if own is not None and not has_ended(own):
            own.step()
        self.steps += 1
        self.samples += sum(piece.samples for piece in pieces)
        self.losses.append(TrialLoss(self.samples, loss))
        return loss

    def test_loss(self) -> float:
        """The loss on the test set. Errors: ValueError for a job without one."""
        if self._evaluation is None:
            raise ValueError(
                f"job {self.job.name} has no test set to score on; let its data function return pt.Data(train, test)"
            )
        self._wake()
        return self._evaluation.score(tensors_of(self.model)).loss

    def recent_loss(self, samples: int) -> float:
        """The mean over the last so many samples; infinite where the run diverged."""
        if self.diverged or not self.losses:
            return math.inf
        last = [each.loss for each in self.losses if each.samples > self.samples - samples]
        return sum(last) / len(last)

    def _whole(self, piece: BatchSlice) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.job, self.model, beside(self.model, piece.batch))
        loss.backward()
        return float(loss.detach())

    def _in_parts(self, pieces: list[BatchSlice]) -> float:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        total, mean_loss = [torch.zeros_like(p) for p in parameters], 0.0
        norms: list[float] = []
        sketches: list[Tensor] = []
        weights = part_weights(self.job, [piece.batch for piece in pieces]) or [piece.share for piece in pieces]
        counting = [(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if weight]
        for piece, weight in counting:
            mean_loss += weight * self._whole(piece)
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense() for p in parameters]
            flat = pack([each.reshape(-1) for each in gradients])
            norms.append(float(torch.linalg.vector_norm(flat)) ** 2)
            sketches.append(sketch(flat, seed=self.steps).cpu())
            torch._foreach_add_(total, gradients, alpha=weight)
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        if math.isfinite(sum(norms)):
            self.noise.append(of_workers([piece.samples for piece, _ in counting], norms, torch.stack(sketches)))
        return mean_loss
