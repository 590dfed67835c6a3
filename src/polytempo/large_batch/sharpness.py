"""How sharp a minimum is: by how much the loss grows in a small box around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

Loss = Callable[[], Tensor]
"""The loss over all the data that is meant, with the parameters as they are at this moment."""

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

    `loss` is called some 2 · steps times with gradients; dropout should be off, and batch norm is as the model's mode
    says: say which. The parameters are afterwards as they were. Memory: with a subspace 8 n p bytes.

    Errors: ValueError where the loss is not finite, or is below -1, where φ has no meaning.
    Source: N. S. Keskar et al., "On large-batch training for deep learning", 2017, metric 2.1.
    """
    start = [parameter.detach().clone() for parameter in parameters]
    x = torch.cat([each.reshape(-1) for each in start]).double().cpu()
    drawn = torch.Generator().manual_seed(seed)
    a = None if subspace is None else torch.randn(x.numel(), subspace, dtype=torch.float64, generator=drawn)
    centre = x if a is None else torch.linalg.lstsq(a, x.unsqueeze(1)).solution.squeeze(1)
    half = epsilon * (centre.abs() + 1)

    def minus(y: np.ndarray) -> tuple[float, np.ndarray]:
        moved = torch.from_numpy(y)
        value, gradient = _at(loss, parameters, x + (moved if a is None else a @ moved))
        return -value, -(gradient if a is None else a.T @ gradient).numpy()

    try:
        value, _ = _at(loss, parameters, x)
        if not -1 < value < float("inf"):
            raise ValueError(f"the loss is {value}; sharpness is for finite losses above -1")
        begin = (2 * torch.rand(half.shape, dtype=torch.float64, generator=drawn) - 1) * half
        bounds = list(zip(-half.numpy(), half.numpy(), strict=True))
        found = minimize(minus, begin.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": steps})
    finally:
        with torch.no_grad():
            for parameter, was in zip(parameters, start, strict=True):
                parameter.copy_(was)
    return 100 * (-float(found.fun) - value) / (1 + value)


def _at(loss: Loss, parameters: Sequence[nn.Parameter], point: Tensor) -> tuple[float, Tensor]:
    """The loss and its gradient there, in float64."""
    begin = 0
    with torch.no_grad():
        for parameter in parameters:
            part = point[begin : begin + parameter.numel()]
            parameter.copy_(part.view(parameter.shape))
            begin += parameter.numel()
    with torch.enable_grad():
        value = loss()
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    flat = [
        torch.zeros(parameter.numel()) if gradient is None else gradient.reshape(-1)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return float(value.detach()), torch.cat([each.detach().double().cpu() for each in flat])
