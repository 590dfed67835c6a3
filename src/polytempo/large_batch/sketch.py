"""A vector of any length as 1,024 numbers that keep norms and inner products on average.

vector   [ row 0 | row 1 | row 2 | … ]      rows of 1,024 numbers
sketch   Σ ± row · σ                        a sign ± drawn for each row, σ signs for each place
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

WIDTH = 1024
_ROWS = 128
"""Rows that are multiplied by their signs at once: they fit the second-level cache."""


@torch.no_grad()
def sketch(vector: Tensor, seed: int) -> Tensor:
    """Sₛ(x): shape (1024,), float64, linear in x; over the draws of s  E ⟨S x, S y⟩ = ⟨x, y⟩.

    The standard deviation of |S x|² is √(2/1024) = 4.4 % of |x|², and independent from seed to seed: averaged over
    steps with seeds of their own it is little. Ranks that give one seed get sketches of one map.

    `vector`: dense, of any shape and dtype. Cost: a pass over it, with two operations an element; memory for 128 rows.
    Source: M. Charikar, K. Chen and M. Farach-Colton, "Finding frequent items in data streams", 2002, with places in
    the order of the vector instead of hashed ones.
    """
    flat = torch.view_as_real(vector).reshape(-1) if vector.is_complex() else vector.detach().reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    total = torch.zeros(WIDTH, dtype=torch.float64, device=flat.device)
    drawn = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (-(-flat.numel() // WIDTH),), generator=drawn).mul_(2).sub_(1).to(flat)
    whole = flat.numel() // WIDTH
    places = _places(flat.dtype, flat.device)
    for block, begin in enumerate(range(0, whole, _ROWS)):
        end = min(begin + _ROWS, whole)
        shift = 37 * block % _ROWS  # else rows of all blocks would meet the same signs
        rows = flat[begin * WIDTH : end * WIDTH].view(-1, WIDTH) * places[shift : shift + end - begin]
        total += signs[begin:end] @ rows
    rest = flat[whole * WIDTH :]
    if rest.numel():
        total[: rest.numel()] += rest * signs[-1]
    return total.cpu()


@cache
def _places(dtype: torch.dtype, device: torch.device) -> Tensor:
    """σ: signs, shape (256, 1024)."""
    drawn = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (2 * _ROWS, WIDTH), generator=drawn, dtype=torch.int8)
    return signs.mul_(2).sub_(1).to(device, dtype)
