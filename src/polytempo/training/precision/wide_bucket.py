"""`WideBucket`: gradients of 16-bit parameters, exchanged in float32 and without the loss scale.

.grad   16 bits · S ──▶ float32, / S ──▶ transform ──▶ float32 ──▶ · S, 16 bits ──▶ .grad

For transforms that compute with gradients, or remember some: their arithmetic is a float32 model's. A plain mean takes
16-bit gradients as they are, in a `Bucket`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polytempo.core import Bundle
from polytempo.core.bundle import by_kind
from polytempo.training.step.bucket import Bucket


class ScaleNow(NamedTuple):
    """The factor of the present step's losses, and `dynamic`: a gradient that is not finite ends no run."""

    factor: float
    dynamic: bool


class Widened(Mapping[str, Tensor]):
    """Gradients in float32, times `factor`: each is converted when it is first asked for, if ever. One worker alone
    exchanges nothing, and most transforms then look at none."""

    def __init__(self, gradients: Mapping[str, Tensor], factor: float) -> None:
        self.gradients = gradients
        self._factor = factor
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """The gradient in memory of its own, unless it is float32 and the factor 1."""
        if name not in self._made:
            own = self.gradients[name]
            wide = own.to(torch.float32)
            if self._factor != 1:
                wide = wide * self._factor if wide is own else wide.mul_(self._factor)
            self._made[name] = wide
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.gradients)

    def __len__(self) -> int:
        return len(self.gradients)


class WideBucket(Bucket):
    """A bucket of parameters of any floating dtype, exchanged in float32. Cost: a pass over the gradients each way,
    where the transform looks at them."""

    def __init__(self, index: int, parameters: Mapping[str, nn.Parameter], scale: Callable[[], ScaleNow]) -> None:
        super().__init__(index, parameters)
        self._scale = scale
        self.overflowed = False
        """True if this rank's gradient was not finite, and zeros were exchanged in its place."""

    def gathered(self, share: float | None) -> Bundle:
        """The gradients in float32. Where the scale is dynamic and one is not finite, zeros: the step is left out."""
        gradients = {name: self._gradient(name, p) for name, p in self.parameters.items()}
        self._begin_exchange()
        factor, dynamic = self._scale()
        self.overflowed = dynamic and not all(bool(each.isfinite().all()) for each in gradients.values())
        if self.overflowed:
            gradients = {name: torch.zeros_like(each) for name, each in gradients.items()}
        return Bundle(Widened(gradients, 1 / factor), share)

    def place(self, answer: Bundle | None, *, answered: bool) -> None:
        """Point every parameter's `.grad` at its part of `answer`, in its own dtype and with the loss scale."""
        if answer is None:
            super().place(None, answered=answered)
            return
        factor, _ = self._scale()
        wide = (answer if factor == 1 else answer.map(lambda flat: flat * factor)).views
        kinds = by_kind({name: p.detach() for name, p in self.parameters.items()})
        narrow = [Bundle({name: wide[name] for name in group}).map(_to(dtype)) for (dtype, _), group in kinds.items()]
        views = {name: view for bundle in narrow for name, view in bundle.views.items()}
        self._show({name: views[name] for name in self.parameters}, narrow[0], answered=answered)


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda flat: flat.to(dtype)
