"""Two-sided compression: the owner of a stripe adds the others' codes, and encodes the sum.

A stripe is the part of all tensors that one rank adds up. The rank keeps its residual of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polytempo.compression.encoding.feedback import Fed
from polytempo.compression.exchange.packing import Packing
from polytempo.compression.exchange.wire_route import Exchanged, ExchangePlan, check_finite, contribution
from polytempo.core import Bundle, CodecState, Port, Residual
from polytempo.core.arithmetic.kernel_use import together
from polytempo.core.arithmetic.merge import Merge
from polytempo.core.state import narrowed, wide


async def reduce_scatter(port: Port, bundle: Bundle, state: Exchanged, plan: ExchangePlan) -> tuple[Bundle, Exchanged]:
    """Two-sided compression: codes go to the owner of each stripe, and the owner's codes of the sum to all ranks.

    A rank's own stripe goes into the sum as it is, residual included, so there is nothing else to remember for it: the
    same memory then keeps the rest of encoding the *sum*, the second residual. Both are parts of all ranks' residual,
    in the same unit, and so survive a change of owners.

    Cost: 2(N-1)/N · K_c bytes from each rank.
    """
    step, rank = state.step + 1, port.rank
    given = contribution(port, bundle, plan)
    check_finite(given, plan.codec, state.codecs, rank)
    parts = plan.striped(bundle, port.size)
    flops = sum(part.flops for part in parts)
    others = [part for owner, part in enumerate(parts) if owner != rank]
    codecs = state.codecs | begun(parts, given.views, state.codecs)

    def encode() -> list[Tensor]:
        return [
            part.encode(given.views, sliced(part, codecs), step, rank)[0] if owner != rank else _none(bundle)
            for owner, part in enumerate(parts)
        ]

    uses = together(use for part in others for use in part.uses("encode"))
    pieces = await port.compute(encode, flops, uses=uses)
    mine = parts[rank]
    like = torch.empty(mine.num_bytes, dtype=torch.uint8, device=bundle.flat.device)
    likes = [like if sender != rank else _none(bundle) for sender in range(port.size)]
    arrived = await port.all_to_all(pieces, likes)

    def reduce() -> Tensor:
        residuals = sliced(mine, codecs)
        take_residual_(mine, given.views, residuals)
        if plan.merge is None:
            total = given
            add_others_(mine, total.views, residuals, arrived, step, rank)
        else:
            total = merged(plan.merge, mine, given, arrived, step, rank)
        return mine.encode(total.views, residuals, step, rank)[0]

    uses = together([*mine.uses("decode", port.size - 1), *mine.uses("encode")])
    sum_wire = await port.compute(reduce, mine.flops * port.size, uses=uses)
    longest = max(part.num_bytes for part in parts)
    padded = torch.zeros(longest, dtype=torch.uint8, device=bundle.flat.device)
    padded[: sum_wire.numel()] = sum_wire
    wires = await port.all_gather(padded)

    def decode() -> Tensor:
        out = bundle.with_flat(torch.zeros_like(bundle.flat))
        for owner, (part, wire) in enumerate(zip(parts, wires, strict=True)):
            part.add_(wire, out.views, step, owner)
        return out.flat

    uses = together(use for part in parts for use in part.uses("decode"))
    return bundle.with_flat(await port.compute(decode, flops, uses=uses)), Exchanged(step, codecs)


def _none(bundle: Bundle) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=bundle.flat.device)


def begun(
    parts: Sequence[Packing], views: Mapping[str, Tensor], states: Mapping[str, CodecState]
) -> dict[str, CodecState]:
    """The states of tensors that are cut into stripes; their residuals exist from now on."""
    found: dict[str, CodecState] = {}
    for piece in (piece for part in parts for piece in part.pieces):
        state = states.get(piece.name)
        if piece.codec.facts.memory == "residual" and (state is None or state.memory.residual is None):
            x = views[piece.name]
            found[piece.name] = Fed(Residual(torch.zeros_like(x, dtype=wide(x.dtype))))
    return found


def sliced(part: Packing, states: Mapping[str, CodecState]) -> dict[str, CodecState]:
    """The part of each residual that belongs to a stripe, as a view: changes of it change the whole."""
    return {
        piece.name: Fed(Residual(piece.of(states[piece.name].memory.residual)))
        for piece in part.pieces
        if piece.codec.facts.memory == "residual"
    }


def take_residual_(part: Packing, views: Mapping[str, Tensor], states: Mapping[str, CodecState]) -> None:
    """x += r; r ← 0, on a stripe with `states`; r ← the rounding error of x, where r has more bits."""
    for piece in part.pieces:
        if piece.name in states:
            x, residual = piece.of(views[piece.name]), states[piece.name].memory.residual
            if residual.dtype is x.dtype:
                x.add_(residual)
                residual.zero_()
            else:
                total = x + residual
                residual.zero_()
                _put_(total, x, residual)


def _put_(total: Tensor, x: Tensor, residual: Tensor | None) -> None:
    """x ← total; residual += the rounding error of x."""
    x.copy_(narrowed(total, x))
    if residual is not None:
        residual.add_(total - x)


def add_others_(
    part: Packing,
    views: Mapping[str, Tensor],
    states: Mapping[str, CodecState],
    arrived: Sequence[Tensor],
    step: int,
    rank: int,
) -> None:
    """x += all others' parts of the stripe, in the order of ranks.

    16 bits are added in float32, and the rounding error of x is residual, where the codec has feedback.
    """
    slices = {piece.name: piece.of(views[piece.name]) for piece in part.pieces}
    totals = {name: x.to(wide(x.dtype)) for name, x in slices.items() if wide(x.dtype) is not x.dtype}
    for sender, message in enumerate(arrived):
        if sender != rank:
            for name in totals:
                slices[name].zero_()
            part.add_(message, views, step, sender)
            for name, total in totals.items():
                total += slices[name]
    for name, total in totals.items():
        _put_(total, slices[name], states[name].memory.residual if name in states else None)


def merged(merge: Merge, part: Packing, own: Bundle, arrived: Sequence[Tensor], step: int, rank: int) -> Bundle:
    """The merge of all ranks' stripes, at this rank's place of the whole."""
    outs = []
    for sender, message in enumerate(arrived):
        out = own if sender == rank else own.with_flat(torch.zeros_like(own.flat))
        if sender != rank:
            part.add_(message, out.views, step, sender)
        outs.append(out)
    merged = own.with_flat(torch.empty_like(own.flat))
    for piece in part.pieces:
        slices = [piece.of(out.views[piece.name]) for out in outs]
        merge_of = merge([each.reshape(-1) for each in slices])
        piece.of(merged.views[piece.name]).copy_(merge_of.view_as(slices[0]))
    return merged
