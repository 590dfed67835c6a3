"""The moving average of weights that a job's options ask to be scored."""

from __future__ import annotations

from torch import nn

from polytempo.large_batch.weight_average import WeightAverage
from polytempo.spec.options import RunOptions

AVERAGE, AVERAGED_STEPS = "average/", "averaged steps"
"""What it is saved under."""


def average_of(model: nn.Module, options: RunOptions) -> WeightAverage | None:
    """Of `model`, which has its first weights; None where none is asked for."""
    return None if options.ema is None else WeightAverage(model, options.ema)
