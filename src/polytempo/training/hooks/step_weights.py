"""`StepWeights`: the weights of a step's batches on one rank, where a loop's `pt.shard` has a weight of its own.

batch    w     factor of its gradient   factor of `.grad` before      `.grad` afterwards
0        6     6/6                                                    g₀
1        2     2/8                      6/8                           (6 g₀ + 2 g₁) / 8
2        0     0, also of NaN           1                             (6 g₀ + 2 g₁) / 8
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from polytempo.worlds.process.shares import Batch, tensors_in


class GradientFactor:
    """Scales gradients of parameters on their way to `.grad` by `value`; 0 also drops NaN."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.value = 1.0
        self.used = False
        """True once a gradient has come."""
        weakly = ref(self)  # torch keeps a parameter's hooks where the garbage collector does not look

        def scaled(gradient: Tensor) -> Tensor | None:
            factor = weakly()
            if factor is not None:
                factor.used = True
            if factor is None or factor.value == 1:
                return None
            return gradient * factor.value if factor.value else torch.zeros_like(gradient)  # NaN times 0 is NaN

        self.hooks = [parameter.register_hook(scaled) for parameter in parameters if parameter.requires_grad]


def zero_output_gradients(module: nn.Module) -> None:
    """Let the gradients that the outputs of the coming call of a module receive be 0."""

    def called(_: nn.Module, inputs: Any, output: Any) -> None:
        handle.remove()
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(torch.zeros_like)

    handle = module.register_forward_hook(called)


class StepWeights:
    """Keeps `.grad` the mean of the step's gradients so far, by the weights of their batches."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.factor = GradientFactor(self._parameters)
        self.total = 0.0
        """The weights of the step's batches so far."""
        self.num_batches = 0
        self._last: Batch | None = None

    @torch.no_grad()
    def take(self, batch: Batch) -> bool:
        """The next gradients are of `batch`. Returns True if it is another one than before."""
        if batch is self._last:
            return False
        before, self._last = self.total, batch
        weight = 1.0 if batch.weight is None else batch.weight
        self.total += weight
        self.num_batches += 1
        self.factor.value = weight / self.total if self.total else 0.0
        if before and weight:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(before / self.total)
        return True

    def end_step(self) -> None:
        """The next batch begins another step."""
        self.total, self.num_batches, self._last, self.factor.value = 0.0, 0, None, 1.0
