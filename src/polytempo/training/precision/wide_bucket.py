"""`WideBucket`: gradients of 16-bit parameters, exchanged in float32 and without the loss scale.

.grad   16 bits · S ──▶ float32, / S ──▶ transform ──▶ float32 ──▶ · S, 16 bits ──▶ .grad

For transforms that compute with gradients, or remember some: their arithmetic is that of a float32 model. A plain mean
takes 16-bit gradients as they are, in a `Bucket`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polytempo.core import Bundle
from polytempo.training.bucket import Bucket
from polytempo.training.tensor_groups import by_kind


class ScaleNow(NamedTuple):
    """What losses of the present step are multiplied by, and whether a gradient that is not finite ends no run."""

    factor: float
    dynamic: bool


class WideBucket(Bucket):
    """A bucket of parameters of any floating dtype, exchanged in float32. Cost: a pass over the gradients each way."""

    def __init__(self, index: int, parameters: Mapping[str, nn.Parameter], scale: Callable[[], ScaleNow]) -> None:
        super().__init__(index, parameters)
        self._scale = scale
        self.overflowed = False
        """Whether this rank's gradient was not finite, and zeros were exchanged in its place."""

    def gathered(self, share: float | None) -> Bundle:
        """The gradients in float32. Where the scale is dynamic and one is not finite, zeros: the step is left out."""
        gradients = {name: self._gradient(name, p).to(torch.float32) for name, p in self.parameters.items()}
        self._begin_exchange()
        factor, dynamic = self._scale()
        bundle = Bundle(gradients, share)
        if factor != 1:
            bundle.flat.mul_(1 / factor)
        self.overflowed = dynamic and not bool(bundle.flat.isfinite().all())
        if self.overflowed:
            bundle.flat.zero_()
        return bundle

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
