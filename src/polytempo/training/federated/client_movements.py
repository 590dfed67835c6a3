"""Movements of clients: as a code's receiver has them, and merged by a function of all of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from polytempo.compression.exchange.packing import EXACT_BELOW
from polytempo.core import Bundle, Codec, EncodeContext, Port
from polytempo.core.arithmetic.merge import Merge
from polytempo.core.arithmetic.slice_tree import subtree
from polytempo.core.bundle import by_kind


def coded(tensor: Tensor, codec: Codec, when: EncodeContext, name: str) -> Tensor:
    """x̂ of a tensor with at least `EXACT_BELOW` elements; a smaller one as it is."""
    return from_wire(to_wire(tensor, codec, when, name), tensor, codec, when, name)


def to_wire(tensor: Tensor, codec: Codec, when: EncodeContext, name: str) -> Tensor:
    """The code of a tensor with at least `EXACT_BELOW` elements; a smaller one as it is."""
    if tensor.numel() < EXACT_BELOW:
        return tensor
    return codec.encode(tensor.contiguous(), None, when._replace(tensor=zlib.crc32(name.encode())))[0]


def most_wire_bytes(like: Tensor, codec: Codec | None) -> int:
    """Bytes of the answer of `to_wire` for such a tensor, or of the tensor, where it has more."""
    if codec is None or like.numel() < EXACT_BELOW or not like.is_floating_point():
        return like.nbytes
    return max(like.nbytes, codec.wire_bytes(like))


def from_wire(wire: Tensor, like: Tensor, codec: Codec, when: EncodeContext, name: str) -> Tensor:
    """The tensor of a code from `to_wire`, shaped as `like`. ValueError for a code that no such tensor has."""
    if like.numel() < EXACT_BELOW:
        return wire
    most, found = codec.wire_bytes(like), wire.numel() * wire.element_size()
    if wire.dtype != codec.wire_dtype(like) or wire.dim() != 1 or found > most or (codec.facts.fixed and found != most):
        raise ValueError(f"{name} is {wire.dtype} of {found:,} bytes, and its code has {most:,}")
    return codec.decode(wire, like, when._replace(tensor=zlib.crc32(name.encode())))


def fair_weights(
    share: float, loss: float, movement: Sequence[Tensor], fairness: float, rates: Sequence[float]
) -> tuple[float, float]:
    """pₖ Fₖ^q, and pₖ (Fₖ^q + q Fₖ^(q-1) Σᵢ ‖Δₖᵢ‖² / ηᵢ), a part of the divisor (`q_fed_avg`).

    `rates`: ηᵢ, the learning rate of each tensor i of the movement; tensors at a rate of 0 have no part in the sum.
    """
    moved = zip(movement, rates, strict=True)
    norm = sum(float(each.double().square().sum()) / rate for each, rate in moved if rate > 0)
    weight = share * loss**fairness
    return weight, weight + (share * fairness * loss ** (fairness - 1) * norm if norm else 0.0)


async def merged_(
    port: Port,
    parameters: Mapping[str, nn.Parameter],
    movements: Mapping[int, Sequence[Tensor]],
    cohort: int,
    merge: Merge,
) -> None:
    """Gather the movements of all clients and let their merge be the gradient, the same on all workers.

    `movements`: by a client's place in the round. Cost: (N-1) · S · K bytes sent, N · S · K held, for S clients of the
    busiest of N workers and K bytes of parameters.
    """
    counts = [len(subtree(cohort, port.size, rank)) for rank in range(port.size)]
    for names in by_kind(parameters).values():
        each = [Bundle({n: own[n] for n in names}).flat for own in _named(parameters, movements)]
        most, numel = max(counts), each[0].numel()
        own_rows = torch.cat([*each, each[0].new_zeros((most - len(each)) * numel)])
        gathered = await port.all_gather(own_rows) if port.size > 1 else [own_rows]
        rows = [row for flat, count in zip(gathered, counts, strict=True) for row in flat.view(most, numel)[:count]]
        answer = Bundle({n: torch.empty_like(parameters[n].detach()) for n in names}).with_flat(merge(rows))
        for name, view in answer.views.items():
            parameters[name].grad = view.clone()


def _named(
    parameters: Mapping[str, nn.Parameter], movements: Mapping[int, Sequence[Tensor]]
) -> list[dict[str, Tensor]]:
    return [dict(zip(parameters, movements[place], strict=True)) for place in sorted(movements)]
