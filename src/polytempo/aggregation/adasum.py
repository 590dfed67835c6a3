"""Adasum: add orthogonal gradients, average parallel ones.

Source: S. Maleki et al., "Scaling distributed training with adaptive summation", 2020, equation (2)
and section 3.2 (recursion over a binary tree, one dot product a layer).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polytempo.core import Bundle, Cost, Exchange, Port, Sent, Transform, averaging, stateless
from polytempo.core.cost import num_bytes
from polytempo.core.state import narrowed, wide

_CHUNK = 1 << 16
"""Elements of a pass: their copies in wider numbers stay in the cache."""


def adasum() -> Transform:
    """The adaptive sum of all ranks' tensors, parameter by parameter.

    For two: a ⊕ b = (1 - a·b / 2‖a‖²) a + (1 - a·b / 2‖b‖²) b, so orthogonal tensors add and equal
    ones average. For N: partners at distance 1, 2, 4, … combine, lower rank first; ranks beyond the
    largest power of two fold into the others before and get the result afterwards. Running statistics are averaged
    along the same pairs.

    a·b, ‖a‖² and ‖b‖² are summed in float64, where no product of two numbers of 32 bits or fewer overflows; 16-bit
    tensors are added in float32, rounded once, and finite values stay finite (`core.state.narrowed`).

    Cost: ⌈log₂N⌉ exchanges of the whole buffer, and three more passes over it for each.
    Deviation: whole vectors are exchanged instead of halves (the paper's section 4.1), which costs
    bytes but keeps every dot product in one place, so all ranks compute the same bits.
    """

    async def apply(port: Port, bundle: Bundle) -> Bundle:
        def combine(a: Tensor, b: Tensor) -> Tensor:
            """a ⊕ b for each parameter; both flat, shape (numel,)."""
            if a.is_meta:  # no values; torch takes a millisecond for each pair of tensors
                return a
            pairs = zip(bundle.with_flat(a).views.values(), bundle.with_flat(b).views.values(), strict=True)
            return torch.cat([adaptive_sum(x, y).reshape(-1) for x, y in pairs])

        return bundle.with_flat(await _along_pairs(port, bundle.flat, combine))

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        power = 1 << (num_ranks.bit_length() - 1)
        extra, rounds, each = num_ranks - power, power.bit_length() - 1, num_bytes(parameters)
        messages, busiest = power * rounds + 2 * extra, rounds + (extra > 0)
        sent = Sent(messages, messages * each, busiest_bytes=busiest * each, rounds=rounds + 2 * (extra > 0))
        return Cost((Exchange("adasum", sent),))

    return stateless(apply, cost=cost, beside=averaging(_summed))


async def _summed(port: Port, buffer: Tensor) -> Tensor:
    """The route of Adasum's pairs, for plain sums."""
    return await _along_pairs(port, buffer, torch.add)


async def _along_pairs(port: Port, flat: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`combine` over a binary tree of all ranks' `flat`; every rank has the result, of the same bits."""
    num_pairs = 1 << (port.size.bit_length() - 1)
    if port.rank >= num_pairs:
        partner = port.rank - num_pairs
        return await port.send_receive(flat, partner, like=flat, source=partner)
    extra = port.rank + num_pairs
    if extra < port.size:
        flat = combine(flat, await port.recv(flat, extra))
    distance = 1
    while distance < num_pairs:
        partner = port.rank ^ distance
        theirs = await port.send_receive(flat, partner, like=flat, source=partner)
        flat = combine(flat, theirs) if port.rank < partner else combine(theirs, flat)
        distance *= 2
    if extra < port.size:
        await port.send(flat, extra)
    return flat


def adaptive_sum(a: Tensor, b: Tensor) -> Tensor:
    """a ⊕ b of two tensors of one shape and dtype. A zero tensor adds nothing."""
    x, y, add_in = a.reshape(-1), b.reshape(-1), wide(a.dtype)
    dot, square_x, square_y = _products(x, y)
    keep_x, keep_y = _kept(dot, square_x), _kept(dot, square_y)
    if add_in is a.dtype:
        return keep_x * a + keep_y * b
    total = torch.empty_like(x)
    for out, *part in zip(total.split(_CHUNK), x.split(_CHUNK), y.split(_CHUNK), strict=True):
        p, q = (each.to(add_in) for each in part)
        out.copy_(narrowed(p.mul_(keep_x).add_(q.mul_(keep_y)), out))
    return total.view_as(a)


def _products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a·b, ‖a‖² and ‖b‖² in float64; a and b flat, shape (numel,)."""
    dot, square_a, square_b = a.new_zeros(3, dtype=torch.float64).unbind()
    for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        x, y = x.double(), y.double()
        dot, square_a, square_b = dot + x.dot(y), square_a + x.dot(x), square_b + y.dot(y)
    return dot, square_a, square_b


def _kept(dot: Tensor, square: Tensor) -> Tensor:
    """1 - dot / 2 square, or 1 where the square is 0."""
    return torch.where(square > 0, 1 - dot / (2 * square), 1.0)
