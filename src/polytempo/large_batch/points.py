"""A model's parameters as one vector, and the loss as a function of it.

x ∈ Rⁿ ──▶ written into the parameters ──▶ loss() ──▶ f(x), ∇f(x), ∇²f(x) v
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Loss = Callable[[], Tensor | Iterable[Tensor]]
"""The loss over all the data that is meant, with the parameters as they are at this moment; or its parts, which add up
to it: of these one at a time is kept for its gradient, so a generator needs the memory of one part."""


class LossSurface:
    """f over the vectors of all `tensors` in their order, of shape (n,), in float64 on the CPU.

    Each call writes its point into the tensors, in their own dtypes; use it within `kept`. Dropout should be off.
    """

    def __init__(self, loss: Loss, tensors: Sequence[Tensor]) -> None:
        self._loss, self._tensors = loss, list(tensors)

    def here(self) -> Tensor:
        """The point where the tensors are."""
        return flat(each.detach() for each in self._tensors)

    @contextmanager
    def kept(self) -> Iterator[Tensor]:
        """Inside, the point of the beginning; afterwards, the tensors as they were, to the bit."""
        before = [each.detach().clone() for each in self._tensors]
        try:
            yield self.here()
        finally:
            with torch.no_grad():
                for tensor, was in zip(self._tensors, before, strict=True):
                    tensor.copy_(was)

    @torch.no_grad()
    def place(self, point: Tensor) -> None:
        """Write a point into the tensors."""
        for tensor, piece in zip(self._tensors, self._pieces(point), strict=True):
            tensor.copy_(piece)

    def value(self, point: Tensor) -> float:
        """f(x)."""
        self.place(point)
        with torch.no_grad():
            return sum(float(part) for part in self._parts())

    def gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """f(x) and ∇f(x)."""
        self.place(point)
        value, total = 0.0, torch.zeros_like(point)
        with torch.enable_grad():
            for part in self._parts():
                value += float(part.detach())
                total += self._flat(torch.autograd.grad(part, self._tensors, allow_unused=True))
        return value, total

    def curvature(self, point: Tensor, direction: Tensor) -> Tensor:
        """∇²f(x) v, by differentiating ∇f · v. Cost: about two gradients."""
        self.place(point)
        total, pieces = torch.zeros_like(point), self._pieces(direction)
        with torch.enable_grad():
            for part in self._parts():
                first = torch.autograd.grad(part, self._tensors, create_graph=True, allow_unused=True)
                slopes = [(g * v).sum() for g, v in zip(first, pieces, strict=True) if g is not None]
                slope = torch.stack(slopes).sum() if slopes else part.detach()
                if slope.requires_grad:  # else the gradient is the same everywhere
                    total += self._flat(torch.autograd.grad(slope, self._tensors, allow_unused=True))
        return total

    def _parts(self) -> Iterator[Tensor]:
        found = self._loss()
        yield from [found] if isinstance(found, Tensor) else found

    def _pieces(self, point: Tensor) -> list[Tensor]:
        parts = point.split([each.numel() for each in self._tensors])
        return [part.view(each.shape).to(each) for part, each in zip(parts, self._tensors, strict=True)]

    def _flat(self, found: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(self._tensors, found, strict=True)
        return flat((each.new_zeros(each.shape) if g is None else g).detach() for each, g in pairs)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All tensors as one vector, float64, on the CPU."""
    return torch.cat([each.reshape(-1).double().cpu() for each in tensors])
