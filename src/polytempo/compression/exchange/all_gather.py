"""Every rank's wires at every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polytempo.compression.exchange.packing import Packing
from polytempo.compression.exchange.wire_route import Exchanged, ExchangePlan, check_finite, contribution
from polytempo.core import Bundle, CodecState, Port
from polytempo.core.state import narrowed, wide


async def all_gather(port: Port, bundle: Bundle, state: Exchanged, plan: ExchangePlan) -> tuple[Bundle, Exchanged]:
    """Every rank's wires at every rank; each rank decodes and adds them in the order of ranks.

    Cost: (N-1) · K_c bytes from each rank for wires of K_c bytes, and one small message before where wires vary.
    """
    step = state.step + 1
    given = contribution(port, bundle, plan)
    check_finite(given, plan.codec, state.codecs, port.rank)
    packing = plan.packing(bundle)

    def encode() -> tuple[Tensor, dict[str, CodecState]]:
        return packing.encode(given.views, state.codecs, step, port.rank)

    message, codecs = await port.compute(encode, packing.flops, uses=packing.uses("encode"))
    messages, source = await _gathered(port, message, packing)

    def decode() -> Tensor:
        if plan.merge is None:
            return _total(packing, messages, bundle, step)
        buffers = [bundle.with_flat(torch.zeros_like(bundle.flat)) for _ in messages]
        _add(packing, messages, buffers, step)
        return plan.merge([buffer.flat for buffer in buffers])

    uses = packing.uses("decode", port.size)
    total = await port.compute(decode, packing.flops * port.size, uses=uses, source=source)
    return bundle.with_flat(total), Exchanged(step, state.codecs | codecs)


async def _gathered(port: Port, message: Tensor, packing: Packing) -> tuple[list[Tensor], Tensor]:
    """The messages, and the first of them as they came."""
    if packing.fixed:
        messages = await port.all_gather(message, read_only=True)
        return messages, messages[0]
    if message.is_meta:
        await port.all_gather(torch.tensor([message.numel()]))
        messages = await port.all_gather(message)
        return messages, messages[0]
    lengths = [int(n) for n in await port.all_gather(torch.tensor([message.numel()], device=message.device))]
    padded = message.new_zeros(max(lengths))
    padded[: message.numel()] = message
    messages = await port.all_gather(padded, read_only=True)
    return [m[:n] for m, n in zip(messages, lengths, strict=True)], messages[0]


def _total(packing: Packing, messages: Sequence[Tensor], bundle: Bundle, step: int) -> Tensor:
    """The sum of the messages' tensors, flat, in the order of ranks.

    16 bits are added in float32, and finite values stay finite. A codec adds to tensors of the dtype that it encoded:
    so each rank's n elements are decoded apart, even for a few entries, where otherwise nothing but those is touched.
    """
    flat = torch.zeros_like(bundle.flat)
    if wide(flat.dtype) is flat.dtype:
        _add(packing, messages, [bundle.with_flat(flat)] * len(messages), step)
        return flat
    part, total = bundle.with_flat(flat), torch.zeros_like(flat, dtype=wide(flat.dtype))
    for rank, message in enumerate(messages):
        packing.add_(message, part.views, step, rank)
        total += flat
        flat.zero_()
    return flat.copy_(narrowed(total, flat))


def _add(packing: Packing, messages: Sequence[Tensor], outs: Sequence[Bundle], step: int) -> None:
    for rank, (message, out) in enumerate(zip(messages, outs, strict=True)):
        packing.add_(message, out.views, step, rank)
