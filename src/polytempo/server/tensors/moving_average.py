"""`MovingAverage`: an average of a shard's weights over its updates, which is scored in place of the weights."""

from __future__ import annotations

import torch
from torch import Tensor


class MovingAverage:
    """w̄ ← d w̄ + (1 - d) w after update t of the shard, d = min(decay, (1 + t) / (10 + t)), as `WeightAverage` has it.

    It begins as the first weights; workers pull the weights and never the average. Kept in float32 or float64.
    Memory: the shard's weights once more. Cost: a pass over them in each update.
    Source: J. Chen et al., "Revisiting distributed synchronous SGD", 2016, section 4: the servers keep the average.
    """

    def __init__(self, decay: float, weights: Tensor) -> None:
        self._decay = decay
        self.present = weights.detach().to(torch.promote_types(weights.dtype, torch.float32), copy=True)

    def update(self, weights: Tensor, number: int) -> None:
        """Take in the weights after update `number`, from 1."""
        keeps = min(self._decay, (1 + number) / (10 + number))
        self.present.lerp_(weights.to(self.present.dtype), 1 - keeps)

    def load(self, saved: Tensor | None) -> None:
        """Go on with a saved average. ValueError where it is of another shard, or the run had none."""
        if saved is None or saved.shape != self.present.shape or saved.dtype != self.present.dtype:
            what = "no average" if saved is None else f"an average {tuple(saved.shape)} of {saved.dtype}"
            raise ValueError(
                f"the shard averages {tuple(self.present.shape)} of {self.present.dtype}, and the state has {what}; "
                "resume with the ema that the run began with"
            )
        self.present.copy_(saved)
