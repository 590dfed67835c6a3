"""`WeightAverage`: a moving average of a model's weights, which is scored while training goes on with the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """An exponential moving average of a model's parameters over the steps of its training.

        w̄ ← d w̄ + (1 - d) w        d = min(decay, (1 + t) / (10 + t)) in step t = 1, 2, …

    It begins as the weights at the time when it is made; the smaller d of the first steps lets it forget them soon, as
    TensorFlow's moving average does, which the paper uses. With `decay` 0.9999 it is over some 10,000 steps. Nothing
    that is trained sees it. In a loop of one's own:

        average = WeightAverage(model, decay=0.999)
        for batch in loader:
            ...
            optimizer.step()
            average.update()
        with average.lent():
            score(model)

    Averaged is every floating-point parameter that is finite at the beginning; buffers, such as the running statistics
    of batch norms, are the model's. Averages of 16-bit parameters are kept in float32: 1 - d would be lost in theirs.

    Memory: the parameters once more. Cost: a pass over them in each step.
    Errors: ValueError unless 0 < decay < 1.
    Source: J. Chen et al., "Revisiting distributed synchronous SGD", 2016, section 4 (decay 0.9999).
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"the decay of a moving average is above 0 and below 1, got {decay!r}")
        self.decay, self.steps = decay, 0
        self._weights = {
            name: weight
            for name, weight in model.named_parameters()
            if weight.is_floating_point() and bool(weight.isfinite().all())
        }
        wide = {name: torch.promote_types(weight.dtype, torch.float32) for name, weight in self._weights.items()}
        self._average = {name: weight.detach().to(wide[name], copy=True) for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of another step."""
        self.steps += 1
        keeps = min(self.decay, (1 + self.steps) / (10 + self.steps))
        now = [weight.detach().to(self._average[name].dtype) for name, weight in self._weights.items()]
        torch._foreach_lerp_(list(self._average.values()), now, 1 - keeps)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The average by the parameters' names, in their dtypes."""
        return {name: self._average[name].to(weight.dtype) for name, weight in self._weights.items()}

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the model's parameters are the average; afterwards they are as before, in their own memory.

        Not for a step of the optimizer inside. Other processes that share the parameters' memory do not see it.
        """
        own = {name: weight.data for name, weight in self._weights.items()}
        try:
            for name, average in self.tensors.items():
                self._weights[name].data = average.clone()
            yield
        finally:
            for name, weight in self._weights.items():
                weight.data = own[name]

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs: averages by name, steps and decay."""
        return {"average": dict(self._average), "steps": self.steps, "decay": self.decay}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the answer of `state_dict`. Errors: ValueError where it is of another model, or another decay."""
        if state["decay"] != self.decay:
            raise ValueError(f"the saved average has decay {state['decay']}, and this one {self.decay}; use the same")
        shapes = {name: tuple(each.shape) for name, each in self._average.items()}
        saved = {name: tuple(each.shape) for name, each in state["average"].items()}
        if shapes != saved:
            names = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
            raise ValueError(f"the saved average is of another model: {', '.join(names[:3])} differ")
        for name, average in self._average.items():
            average.copy_(state["average"][name])
        self.steps = int(state["steps"])
