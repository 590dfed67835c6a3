"""Adasum: add what is orthogonal, average what is parallel.

Source: S. Maleki et al., "Scaling distributed training with adaptive summation", 2020, equation (2)
and section 3.2 (recursion over a binary tree, one dot product a layer).
"""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.core import Bundle, Port, Transform, stateless


def adasum() -> Transform:
    """The adaptive sum of all ranks' tensors, parameter by parameter.

    For two: a ⊕ b = (1 - a·b / 2‖a‖²) a + (1 - a·b / 2‖b‖²) b, so orthogonal tensors add and equal
    ones average. For N: partners at distance 1, 2, 4, … combine, lower rank first; ranks beyond the
    largest power of two fold into the others before and get the result afterwards.

    Cost: ⌈log₂N⌉ exchanges of the whole buffer.
    Deviation: whole vectors are exchanged instead of halves (the paper's section 4.1), which costs
    bytes but keeps every dot product in one place, so all ranks compute the same bits.
    """

    async def apply(port: Port, bundle: Bundle) -> Bundle:
        num_pairs = 1 << (port.size.bit_length() - 1)
        flat = bundle.flat
        if port.rank >= num_pairs:
            await port.send(flat, port.rank - num_pairs)
            return bundle.with_flat(await port.recv(flat, port.rank - num_pairs))
        extra = port.rank + num_pairs
        if extra < port.size:
            flat = _combine(bundle, flat, await port.recv(flat, extra))
        distance = 1
        while distance < num_pairs:
            partner = port.rank ^ distance
            sending = await port.start(port.send(flat, partner))
            theirs = await port.recv(flat, partner)
            await sending
            flat = _combine(bundle, flat, theirs) if port.rank < partner else _combine(bundle, theirs, flat)
            distance *= 2
        if extra < port.size:
            await port.send(flat, extra)
        return bundle.with_flat(flat)

    return stateless(apply)


def _combine(layout: Bundle, a: Tensor, b: Tensor) -> Tensor:
    """a ⊕ b for each parameter of `layout`; both flat, shape (numel,)."""
    pairs = zip(layout.with_flat(a).views.values(), layout.with_flat(b).views.values(), strict=True)
    return torch.cat([adaptive_sum(x, y).reshape(-1) for x, y in pairs])


def adaptive_sum(a: Tensor, b: Tensor) -> Tensor:
    """a ⊕ b of two tensors of one shape. A zero tensor adds nothing."""
    dot = torch.sum(a * b)
    return _kept(dot, a) * a + _kept(dot, b) * b


def _kept(dot: Tensor, x: Tensor) -> Tensor:
    square = torch.sum(x * x)
    return torch.where(square > 0, 1 - dot / (2 * square.clamp_min(torch.finfo(x.dtype).tiny)), 1.0)
