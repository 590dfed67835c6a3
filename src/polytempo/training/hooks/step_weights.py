"""`StepWeights`: the weights of a step's batches on one rank, where a loop's `pt.shard` has a weight of its own.

batch    w     factor of its gradient   factor of `.grad` before      `.grad` afterwards
0        6     6/6                                                    g₀
1        2     2/8                      6/8                           (6 g₀ + 2 g₁) / 8
2        0     0, also of NaN           1                             (6 g₀ + 2 g₁) / 8

One backward pass of several batches has one factor, of the first one's weight. The others count by their outputs:

0, 1     6, 2  6/8; outputs of 1 by 2/6                               (6 g₀ + 2 g₁) / 8
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polytempo.core.calls.refusals import refuse
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


def scale_output_gradients(module: nn.Module, factor: float) -> None:
    """Let gradients count `factor` times behind the outputs of the coming call of a module, each once, also where one
    output is made of another. PT1116 for other outputs than tensors, and lists, tuples and dictionaries of them.
    """
    if factor == 1:
        return
    seen: set[int] = set()

    def called(_: nn.Module, inputs: Any, output: Any) -> Any:
        handle.remove()
        found = tree_map_only(Tensor, scaled, output)
        if not seen or any(id(tensor) not in seen for tensor in tensors_in(output)):
            refuse({"own loop", "uneven batches", "outputs"}, kind=type(output).__name__)
        return found

    def scaled(tensor: Tensor) -> Tensor:
        seen.add(id(tensor))
        if not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(lambda gradient: gradient * factor if factor else torch.zeros_like(gradient))
        return view

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
        self._first: float | None = None
        """The weight of the first batch of the coming backward pass that counts; 0 while none does."""

    @torch.no_grad()
    def take(self, batch: Batch, module: nn.Module | None = None) -> bool:
        """The next gradients are of `batch`, which `module` is called with. Returns True if it is another one than
        before."""
        weight = batch.weight or 0.0
        if self.factor.used:
            self.factor.used, self._first = False, None
        if module is not None and self._first is not None and (self._first or weight):
            scale_output_gradients(module, weight / (self._first or weight))
        elif module is not None and not weight:
            zero_output_gradients(module)
        self._first = self._first or weight
        before, is_new = self.total, batch is not self._last
        if is_new:
            self._last = batch
            self.total += weight
            self.num_batches += 1
        self.factor.value = self._first / self.total if self.total else 0.0
        if before and weight and is_new:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(before / self.total)
        return is_new

    def end_step(self) -> None:
        """The next batch begins another step."""
        self.total, self.num_batches, self._last, self._first = 0.0, 0, None, None
        self.factor.value, self.factor.used = 1.0, False
