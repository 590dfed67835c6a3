"""Two-sided compression: the owner of a stripe adds what the others encoded, and encodes the sum."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.compression.exchange.stripe import add_others_, begun, merged, sliced, take_residual_
from polytempo.compression.exchange.wire_route import Exchanged, ExchangePlan, check_finite, contribution
from polytempo.core import Bundle, Port
from polytempo.core.arithmetic.kernel_use import together


async def reduce_scatter(port: Port, bundle: Bundle, state: Exchanged, plan: ExchangePlan) -> tuple[Bundle, Exchanged]:
    """Two-sided compression: codes go to the owner of each stripe, and the owner's codes of the sum to all ranks.

    A rank's own stripe goes into the sum as it is, residual included, so there is nothing else to remember for it: the
    same memory then keeps what the encoding of the *sum* leaves, the second residual. Both are parts of what all ranks
    together hold back, in the same unit, and so survive a change of owners.

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
