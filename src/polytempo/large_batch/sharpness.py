"""The shape of a loss near a model: its growth, curvature and sections. `churn` compares two models' predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_STEPS = 10

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


def sharpness(
    loss: Loss,
    parameters: Sequence[nn.Parameter],
    epsilon: float = 1e-3,
    *,
    subspace: int | None = None,
    steps: int = _STEPS,
    seed: int = 0,
) -> float:
    """Keskar's φ, in percent:

        φ = 100 · (max over y ∈ C of f(x + A y) - f(x)) / (1 + f(x))        C = {z: |zᵢ| ≤ ε (|(A⁺x)ᵢ| + 1)}

    x: all parameters as one vector of n numbers. A is the identity, or with `subspace` p a random n × p matrix with
    independent normal elements, A⁺ its pseudo-inverse. The maximum is sought by so many iterations of L-BFGS-B, in
    float64, from a random point of the box: at an exact minimum the gradient is 0, and a search from there would stay.
    The answer is a lower bound of the true φ.

    `loss` is called some 2 · steps times with gradients. Dropout should be off; batch norm is as the model's mode says:
    say which. The parameters are afterwards as they were. Memory: with a subspace 8 n p bytes.

    Errors: ValueError where the loss is not finite, or is below -1, where φ has no meaning; for an ε that is not
    positive, no dimension, and no step.
    Source: N. S. Keskar et al., "On large-batch training for deep learning", 2017, metric 2.1.
    """
    from scipy.optimize import minimize

    if not 0 < epsilon < float("inf"):
        raise ValueError(f"epsilon must be a positive number, got {epsilon!r}")
    if steps < 1 or (subspace is not None and subspace < 1):
        raise ValueError(f"a search takes a step and a dimension at least, got steps={steps} and subspace={subspace}")
    surface = LossSurface(loss, parameters)
    drawn = torch.Generator().manual_seed(seed)
    with surface.kept() as x:
        a = None if subspace is None else torch.randn(x.numel(), subspace, dtype=torch.float64, generator=drawn)
        centre = x if a is None else torch.linalg.lstsq(a, x.unsqueeze(1)).solution.squeeze(1)
        half = epsilon * (centre.abs() + 1)
        value = surface.value(x)
        if not -1 < value < float("inf"):
            raise ValueError(f"the loss is {value}; sharpness is for finite losses above -1")

        def minus(y: np.ndarray) -> tuple[float, np.ndarray]:
            moved = torch.from_numpy(y)
            found, gradient = surface.gradient(x + (moved if a is None else a @ moved))
            return -found, -(gradient if a is None else a.T @ gradient).numpy()

        begin = (2 * torch.rand(half.shape, dtype=torch.float64, generator=drawn) - 1) * half
        bounds = list(zip(-half.numpy(), half.numpy(), strict=True))
        found = minimize(minus, begin.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": steps})
    return 100 * (-float(found.fun) - value) / (1 + value)


def neighbourhood_loss(loss: Loss, parameters: Sequence[nn.Parameter], rho: float = 0.05) -> float:
    """The loss that SAM descends, the largest one within ρ of x to first order:

        f(x + ρ g / ‖g‖)        g = ∇f(x);  f(x) where g = 0

    Cost: one gradient and one value. The parameters are afterwards as they were. Errors: ValueError for a ρ of 0 or
    less. Source: P. Foret et al., "Sharpness-aware minimization for efficiently improving generalization", 2021,
    equations 1 and 2 with p = 2.
    """
    if not 0 < rho < float("inf"):
        raise ValueError(f"rho must be a positive number, got {rho!r}")
    surface = LossSurface(loss, parameters)
    with surface.kept() as x:
        value, gradient = surface.gradient(x)
        length = float(torch.linalg.vector_norm(gradient))
        return value if length == 0 else surface.value(x + rho / length * gradient)


class Eigenvalue(NamedTuple):
    """An eigenvalue of the Hessian ∇²f(x) as power iteration has left it."""

    value: float
    """λ = v · ∇²f v, for the unit vector v that was reached."""
    residual: float
    """‖∇²f v - λ v‖: an eigenvalue is within this distance of λ."""
    steps: int
    """Products of the Hessian with a vector that it took."""


def top_eigenvalue(
    loss: Loss, parameters: Sequence[nn.Parameter], *, steps: int = 100, tolerance: float = 1e-2, seed: int = 0
) -> Eigenvalue:
    """The largest eigenvalue of the loss's Hessian: the loss's curvature in the direction where it is largest.

        v ← ∇²f v / ‖∇²f v‖        from a random v, until ‖∇²f v - λ v‖ ≤ tolerance · |λ|, for so many steps at most

    That finds the eigenvalue λ of largest size. Where it is negative, a second iteration on ∇²f - λ, which has no
    negative eigenvalue, finds the largest one. Plain gradient descent on a quadratic diverges at rates above
    2 / λ. Cost: a product with the Hessian takes about two gradients; memory as two gradients of a part of the loss.

    The parameters are afterwards as they were. Errors: ValueError for no step; RuntimeError of torch for a loss that
    cannot be differentiated twice.
    """
    if steps < 1:
        raise ValueError(f"power iteration takes at least one step, got {steps}")
    surface = LossSurface(loss, parameters)
    drawn = torch.Generator().manual_seed(seed)
    with surface.kept() as x:
        begin = torch.randn(x.shape, dtype=torch.float64, generator=drawn)
        found = _largest(lambda v: surface.curvature(x, v), begin, steps, tolerance)
        if found.value >= 0:
            return found
        low = found.value
        shifted = _largest(lambda v: surface.curvature(x, v) - low * v, begin, steps, tolerance)
        return Eigenvalue(shifted.value + low, shifted.residual, found.steps + shifted.steps)


def _largest(times: Callable[[Tensor], Tensor], begin: Tensor, steps: int, tolerance: float) -> Eigenvalue:
    """The eigenvalue of largest size of a symmetric matrix, given as its product with a vector."""
    v = begin / torch.linalg.vector_norm(begin)
    value = residual = 0.0
    for step in range(1, steps + 1):
        product = times(v)
        value = float(v @ product)
        residual = float(torch.linalg.vector_norm(product - value * v))
        length = float(torch.linalg.vector_norm(product))
        if length == 0 or residual <= tolerance * abs(value):
            return Eigenvalue(value, residual, step)
        v = product / length
    return Eigenvalue(value, residual, steps)


def losses_between(loss: Loss, tensors: Sequence[Tensor], others: Sequence[Tensor], at: Sequence[float]) -> list[float]:
    """f((1 - α) x + α x') for each α of `at`: 0 is the model itself, 1 the other one, which has the same shapes.

    `tensors`: parameters, and buffers where they are to follow, as the running statistics of norms: else these are the
    model's own all along. Afterwards they are as they were. Cost: a value of the loss for each α.
    Source: I. J. Goodfellow, O. Vinyals and A. M. Saxe, "Qualitatively characterizing neural network optimization
    problems", 2015; Keskar et al., 2017, figure 3, between a small-batch and a large-batch minimum.
    """
    shapes, theirs = ([tuple(each.shape) for each in several] for several in (tensors, others))
    if shapes != theirs:
        raise ValueError(f"a line joins two models of the same shapes, got {shapes} and {theirs}")
    surface, end = LossSurface(loss, tensors), flat(others)
    with surface.kept() as x:
        return [surface.value((1 - alpha) * x + alpha * end) for alpha in at]


def filter_direction(parameters: Sequence[nn.Parameter], seed: int = 0) -> Tensor:
    """A random direction, shape (n,), with every filter as long as the model's own: dᵢ ← dᵢ ‖wᵢ‖ / ‖dᵢ‖.

    A filter leads to one output: w[i] of a parameter with two dimensions or more. Along biases and gains of
    norms it is 0. Surfaces of models with weights of different scales can be compared so.
    Source: H. Li et al., "Visualizing the loss landscape of neural nets", 2018, section 4.
    """
    drawn = torch.Generator().manual_seed(seed)
    parts = []
    for parameter in parameters:
        if parameter.ndim <= 1:
            parts.append(torch.zeros(parameter.numel(), dtype=torch.float64))
            continue
        own = parameter.detach().double().cpu().flatten(1)
        part = torch.randn(own.shape, dtype=torch.float64, generator=drawn)
        parts.append((part * own.norm(dim=1, keepdim=True) / part.norm(dim=1, keepdim=True)).reshape(-1))
    return torch.cat(parts)


def losses_around(
    loss: Loss, parameters: Sequence[nn.Parameter], across: Tensor, along: Tensor, at: Sequence[float]
) -> list[list[float]]:
    """f(x + α a + β b) for α and β of `at`, as rows by β, each by α; `across` is a, `along` is b.

    Directions are vectors of shape (n,), such as `filter_direction` makes. The parameters are afterwards as they were.
    Cost: len(at)² values of the loss.
    """
    surface = LossSurface(loss, parameters)
    with surface.kept() as x:
        return [[surface.value(x + alpha * across + beta * along) for alpha in at] for beta in at]


def churn(one: Tensor, other: Tensor) -> float:
    """The mean over samples of ½ Σ |p - p'|, from 0 to 1: the part of the probability that two models give to different
    classes.

    `one`, `other`: probabilities of shape (samples, classes), of two runs that differ in their seeds. With two classes
    it is the mean of |p - p'|. Errors: ValueError for other shapes.
    Source: R. Anil et al., "Large scale distributed neural network training through online distillation", 2018,
    section 4.
    """
    if one.ndim != 2 or one.shape != other.shape:
        shapes = f"{tuple(one.shape)} and {tuple(other.shape)}"
        raise ValueError(f"churn compares probabilities of shape (samples, classes), got {shapes}")
    return float((one.double() - other.double()).abs().sum(1).mean() / 2)
