"""`ServedContext`: what the worker of a parameter server is given for its part of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port, Program, Strategy
from polytempo.data.batches import Batches
from polytempo.spec.job import Data, Job
from polytempo.spec.result import parameters_sha256
from polytempo.training.model.local_decay import LocalDecay
from polytempo.training.pipeline.served_stage import ServedStage
from polytempo.training.precision.masters import Masters
from polytempo.training.served.part_noise import PartNoise
from polytempo.training.served.rate_schedule import RateSchedule
from polytempo.training.served.served_replica import Trained
from polytempo.training.step.guard import Guard

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
    reads: bool = True
    """Whether batches are read; False where tensors have no values."""
    seed: int = 0
    schedule: RateSchedule | None = None
    decay: LocalDecay | None = None
    guard: Guard | None = None
    """Looks for what is not finite; None: it may be."""
    noise: PartNoise | None = None
    """Measures the gradient noise scale; None: nothing does."""
    masters: Masters | None = None
    """Of the model, where it computes in 16 bits."""
    stage: ServedStage | None = None
    """This process's stage, where the model is cut; `model` is then that of the stage."""
    trained: Trained | None = None
    """Of `model`; None: the worker looks it up."""

    @property
    def whole(self) -> nn.Module:
        """The whole model: that of the first stage has all stages' final weights when its work is over."""
        return self.model if self.stage is None else self.stage.whole

    def sha256(self) -> str:
        """Of the whole model's float32 parameters, as results have it."""
        with nullcontext() if self.masters is None else self.masters.in_float32():
            return parameters_sha256(self.whole.parameters())
