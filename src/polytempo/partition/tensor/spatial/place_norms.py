"""Norms of pictures with some places on each rank: statistics are of all places.

    mean = Σ_r p_r · mean_r        var = Σ_r p_r · (var_r + (mean_r - mean)²)        p_r: rank r's share of the places

The ranks gather (mean_r, var_r), so nothing is lost by cancellation. Cost of N ranks for C statistics: forward a gather
and backward a reduction, each N · (N-1) · 2C numbers of all ranks; and a sum of the parameters' gradients.

Source: T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
1979, for the union of samples.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from polytempo.partition.tensor.exchange import gathered_to_split, shared_together
from polytempo.partition.tensor.spatial.picture_part import PicturePart
from polytempo.partition.wires import AS_THEY_ARE


def batch_norm(
    part: PicturePart,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> PicturePart | None:
    """`functional.batch_norm`, with running statistics of all places."""
    w, b = shared_together(part.group, weight, bias)
    if not training:
        return part.of(functional.batch_norm(part.tensor, running_mean, running_var, w, b, False, momentum, eps))
    samples, channels = part.tensor.shape[:2]
    count = samples * prod(part.places.sizes)
    if count == 1:
        return None
    flat = _wide(part.tensor).flatten(2)
    mean, var = _statistics(part, flat, (0, 2))
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.view(channels).to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((var * (count / (count - 1))).view(channels).to(running_var.dtype), momentum)
    return part.of(_scaled(part, (flat - mean) * (var + eps).rsqrt(), w, b))


def group_norm(
    part: PicturePart, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> PicturePart | None:
    """`functional.group_norm`."""
    samples, channels = part.tensor.shape[:2]
    if channels % num_groups:
        return None
    w, b = shared_together(part.group, weight, bias)
    flat = _wide(part.tensor).reshape(samples, num_groups, -1)
    mean, var = _statistics(part, flat, (2,))
    return part.of(_scaled(part, ((flat - mean) * (var + eps).rsqrt()).reshape(samples, channels, -1), w, b))


def instance_norm(
    part: PicturePart,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> PicturePart | None:
    """`functional.instance_norm` without running statistics."""
    if running_mean is not None or running_var is not None or part.tensor.dim() != part.dims + 2:
        return None
    return group_norm(part, part.tensor.shape[1], weight, bias, eps)


def _statistics(part: PicturePart, flat: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and variance over `dims` and all ranks' places; they keep the dimensions."""
    own = torch.stack([flat.mean(dims, keepdim=True), flat.var(dims, correction=0, keepdim=True)])
    size = part.group.size
    every = gathered_to_split(part.group, own.unsqueeze(0), [1] * size, 0, AS_THEY_ARE)
    total = prod(part.places.sizes)
    shares = every.new_tensor([part.places.numbers(rank) / total for rank in range(size)])
    shares = shares.view(-1, *[1] * flat.dim())
    mean = (every[:, 0] * shares).sum(0)
    return mean, ((every[:, 1] + (every[:, 0] - mean).square()) * shares).sum(0)


def _scaled(part: PicturePart, flat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(samples, channels, places) times weights of channels, as the part."""
    found = flat if weight is None else flat * weight.view(-1, 1)
    found = found if bias is None else found + bias.view(-1, 1)
    return found.view(part.tensor.shape).to(part.tensor.dtype)


def _wide(tensor: Tensor) -> Tensor:
    """Statistics of 16-bit numbers are computed in 32 bits."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
