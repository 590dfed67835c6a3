"""How sharp a minimum is: by how much the loss grows near it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from polytempo.large_batch.points import Loss, LossSurface

_STEPS = 10


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
