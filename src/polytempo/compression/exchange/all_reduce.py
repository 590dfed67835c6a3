"""Wires that are numbers are added on their way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from polytempo.compression.exchange.packing import whole
from polytempo.compression.exchange.wire_route import Exchanged, ExchangePlan, WireRoute, check_finite, contribution
from polytempo.core import Bundle, Codec, CodecState, EncodeContext, NotFinite, Port, Route
from polytempo.core.coding import codec_use


def all_reduce(route: Route) -> WireRoute:
    """Wires are added on their way by `route`, as numbers. The answer is in the bundle's memory.

    Of 16-bit tensors `exact` and `random_k` have wires of 16 bits: sums of these are rounded on their way, which no
    residual keeps, and may become infinite. `all_gather` adds them in float32.

    Cost: the route's for K_c bytes; where the codec has a `statistic`, first an all-gather of a number for each tensor.
    """

    async def wire_route(port: Port, bundle: Bundle, state: Exchanged, plan: ExchangePlan) -> tuple[Bundle, Exchanged]:
        given = contribution(port, bundle, plan)
        if plan.codec.facts.elementwise:
            return await _summed(port, route, given, plan.codec), Exchanged(state.step + 1, state.codecs)
        step, codec, size = state.step + 1, plan.codec, port.size
        check_finite(given, codec, state.codecs, port.rank)
        views = {name: view for name, view in given.views.items() if view.numel()}
        agreed = await _agreed(port, codec, views, state.codecs)
        pieces = whole(views, codec, 0)
        whens = [
            EncodeContext(step, port.rank, piece.number, size, each) for piece, each in zip(pieces, agreed, strict=True)
        ]
        flops = codec.facts.flops * bundle.flat.numel()

        def encode() -> tuple[Tensor, list[Tensor], dict[str, CodecState]]:
            buffer, wires = _rooms(codec, list(views.values()), size)
            after = {}
            for (name, x), when, room in zip(views.items(), whens, wires, strict=True):
                after[name] = _encoded(codec, x, state.codecs.get(name), when, name, room)
            return buffer, wires, after

        num_bytes, calls = _num_bytes(bundle.flat), len(views)
        uses = (codec_use("encode", codec, num_bytes, calls),)
        buffer, wires, codecs = await port.compute(encode, flops, uses=uses)
        total = await route(port, buffer)

        def decode() -> Tensor:
            given.flat.zero_()
            if total.is_meta:
                return given.flat
            for out, when, wire in zip(views.values(), whens, total.split([w.numel() for w in wires]), strict=True):
                codec.add_(wire, out, when)
            return given.flat

        uses = (codec_use("decode", codec, num_bytes, calls),)
        return given.with_flat(await port.compute(decode, flops, uses=uses)), Exchanged(step, state.codecs | codecs)

    return wire_route


async def _summed(port: Port, route: Route, given: Bundle, codec: Codec) -> Bundle:
    """Wires that are the values themselves, element by element: one for the whole buffer, written back over it."""
    flat = given.flat
    when, room = EncodeContext(terms=port.size), flat if codec.wire_dtype(flat) is flat.dtype else None
    flops, num_bytes = codec.facts.flops * flat.numel(), _num_bytes(flat)
    uses = (codec_use("encode", codec, num_bytes),)
    wire = await port.compute(lambda: codec.encode(flat, None, when, room)[0], flops, uses=uses)
    total = await route(port, wire)

    def decode() -> Tensor:
        smaller = torch.finfo(flat.dtype).max < torch.finfo(total.dtype).max  # only decoding keeps finite values finite
        return flat.copy_(codec.decode(total, flat) if smaller and not total.is_meta else total)

    return given.with_flat(await port.compute(decode, flops, uses=(codec_use("decode", codec, num_bytes),)))


def _num_bytes(flat: Tensor) -> int:
    return flat.numel() * flat.element_size()


def _rooms(codec: Codec, views: Sequence[Tensor], terms: int) -> tuple[Tensor, list[Tensor]]:
    """Memory for a wire of each tensor, one behind the other, and where each is."""
    dtype = codec.wire_dtype(views[0], terms)
    sizes = [codec.wire_bytes(view, terms) // dtype.itemsize for view in views]
    buffer = torch.empty(sum(sizes), dtype=dtype, device=views[0].device)
    return buffer, list(buffer.split(sizes))


async def _agreed(
    port: Port, codec: Codec, views: Mapping[str, Tensor], states: Mapping[str, CodecState]
) -> list[float | None]:
    """The largest statistic of all ranks for each tensor."""
    if any(view.is_meta for view in views.values()):
        if codec.facts.statistic is not None:
            await port.all_gather(torch.zeros(len(views), dtype=torch.float64))
        return [None] * len(views)
    found = []
    for name, view in views.items():
        with _named(f"{name} on rank {port.rank}"):
            found.append(codec.statistic(view, states.get(name)))
    own = [value for value in found if value is not None]
    if not own:
        return [None] * len(found)
    device = next(iter(views.values())).device
    table = torch.stack(await port.all_gather(torch.tensor(own, dtype=torch.float64, device=device)))
    largest = iter(table.max(dim=0).values.tolist())
    return [None if value is None else next(largest) for value in found]


def _encoded(codec: Codec, x: Tensor, state: CodecState, when: EncodeContext, name: str, room: Tensor) -> CodecState:
    """Fill `room`; the next state."""
    if x.is_meta:
        return state
    with _named(f"{name} on rank {when.rank}"):
        return codec.encode(x, state, when, room)[1]


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Add the tensor's name to a codec's refusal."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite(error.codec, error.index, error.value, place) from None
