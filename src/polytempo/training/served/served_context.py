"""`ServedContext`: a worker's arguments for its part of a run with a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port, Program, Strategy
from polytempo.core.system.url_path import Place
from polytempo.data.batches import Batches
from polytempo.spec.job import Data, Job
from polytempo.spec.result import parameters_sha256
from polytempo.training.model.local_decay import LocalDecay
from polytempo.training.pipeline.served_stage import ServedStage
from polytempo.training.precision.masters import Masters, clip_alone
from polytempo.training.served.part_noise import PartNoise
from polytempo.training.served.rate_schedule import RateSchedule
from polytempo.training.served.served_replica import Trained
from polytempo.training.step.guard import Guard
from polytempo.worlds.trace import OpTotals

ComputeGradients = Callable[[Port, Any, int], Program[Tensor]]
"""Forward and backward on a batch of so many samples: leaves `.grad` on the parameters, answers the mean loss."""


@dataclass
class ServedContext:
    """Everything that one worker needs for its part of a run."""

    job: Job
    strategy: Strategy
    model: nn.Module
    optimizer: Optimizer
    data: Data
    batches: Batches
    compute_gradients: ComputeGradients
    passes: Callable[[int], list[int]]
    """The samples of each pass over a batch of so many."""
    reads: bool = True
    """False for tensors without values: batches are not read."""
    seed: int = 0
    schedule: RateSchedule | None = None
    decay: LocalDecay | None = None
    guard: Guard | None = None
    noise: PartNoise | None = None
    masters: Masters | None = None
    clip_norm: float | None = None
    """The bound of the gradient of a worker's batch."""
    stage: ServedStage | None = None
    """This process's stage of a pipeline; `model` is then the stage's."""
    out: Place | None = None
    """The run's folder, for pictures that the job's functions log."""
    record: Callable[[dict[str, Any]], None] | None = None
    """Takes rows that the job's functions log. None: they go with the worker's rows, in its messages, which a virtual
    world charges for."""
    exchanged: Callable[[int], Mapping[str, OpTotals]] = lambda worker: {}
    """The messages of a worker so far, by operation."""
    trained: Trained | None = None
    """The trained parameters of `model`; None: the worker looks them up."""

    @property
    def whole(self) -> nn.Module:
        """The whole model: the first stage's has all stages' final weights when its work is over."""
        return self.model if self.stage is None else self.stage.whole

    def clip(self) -> None:
        """Clip the gradient of the batch, before it is pushed; with masters their step does the scaling."""
        if self.clip_norm is not None and self.reads:
            clip_alone(self.model.parameters(), self.masters, self.clip_norm)

    def sha256(self) -> str:
        """The hash of the whole model's float32 parameters, for results."""
        with nullcontext() if self.masters is None else self.masters.in_float32():
            return parameters_sha256(self.whole.parameters())
