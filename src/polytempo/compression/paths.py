"""The three ways on which encoded tensors meet. Which of them is right depends on the codec: see `through`.

all_reduce       wires are numbers that may be added                  every rank decodes one sum
all_gather       everybody sends everybody its wire                   every rank decodes N wires
reduce_scatter   each rank owns a stripe: it gets the others'         every rank decodes N-1 wires of a stripe,
                 wires of it, adds, encodes the sum, hands it out     and then N wires of 1/N each
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.compression.cast import Cast
from polytempo.compression.exact import Exact
from polytempo.compression.packing import EXACT_BELOW, Packing, stripes, whole
from polytempo.compression.stripe import add_others_, begun, merged, sliced, take_residual_
from polytempo.core import Bundle, Codec, CodecState, EncodeContext, NotFinite, Port, Program, Residual, Route
from polytempo.core.merge import Merge
from polytempo.core.state import narrowed, wide
from polytempo.native.library import available
from polytempo.native.update import DTYPES_CHECKED, unfinite


class Exchanged(NamedTuple):
    """How many tensors were exchanged so far, and the codec's state for each parameter."""

    step: int
    codecs: dict[str, CodecState]


@dataclass(frozen=True)
class Way:
    """What an exchange needs to know: `merge` None is the weighted mean. Layouts are worked out once and kept."""

    codec: Codec
    merge: Merge | None = None
    exact_below: int = EXACT_BELOW
    layouts: dict[tuple[Any, ...], list[Packing]] = field(default_factory=dict)

    def packing(self, bundle: Bundle) -> Packing:
        """The whole bundle as one message."""
        return self.striped(bundle, 1)[0]

    def striped(self, bundle: Bundle, num_ranks: int) -> list[Packing]:
        """The bundle as a message for each owner of a stripe."""
        key = (num_ranks, *((name, t.shape, t.dtype) for name, t in bundle.tensors.items()))
        if key not in self.layouts:
            likes = bundle.views
            pieces = whole(likes, self.codec, self.exact_below)
            cut = stripes(pieces, likes, num_ranks) if num_ranks > 1 else [pieces]
            self.layouts[key] = [Packing(stripe, likes) for stripe in cut]
        return self.layouts[key]


Path = Callable[[Port, Bundle, Exchanged, Way], Program["tuple[Bundle, Exchanged]"]]


async def all_gather(port: Port, bundle: Bundle, state: Exchanged, way: Way) -> tuple[Bundle, Exchanged]:
    """Everybody's wires everywhere; every rank decodes and adds them in the order of ranks.

    Cost: (N-1) · K_c bytes from each rank for wires of K_c bytes, and one small message before where wires vary.
    """
    step = state.step + 1
    contribution = _contribution(port, bundle, way)
    _refuse_nonfinite(contribution, way.codec, state.codecs, port.rank)
    packing = way.packing(bundle)

    def encode() -> tuple[Tensor, dict[str, CodecState]]:
        return packing.encode(contribution.views, state.codecs, step, port.rank)

    message, codecs = await port.compute(encode, packing.flops)
    messages = await _gathered(port, message, packing)

    def decode() -> Tensor:
        if way.merge is None:
            return _total(packing, messages, bundle, step)
        buffers = [bundle.with_flat(torch.zeros_like(bundle.flat)) for _ in messages]
        _add(packing, messages, buffers, step)
        return way.merge([buffer.flat for buffer in buffers])

    total = await port.compute(decode, packing.flops * port.size)
    return bundle.with_flat(total), Exchanged(step, state.codecs | codecs)


async def reduce_scatter(port: Port, bundle: Bundle, state: Exchanged, way: Way) -> tuple[Bundle, Exchanged]:
    """Two-sided compression: codes go to the owner of each stripe, and the owner's codes of the sum to everybody.

    A rank's own stripe goes into the sum as it is, residual included, so there is nothing else to remember for it: the
    same memory then keeps what the encoding of the *sum* leaves, the second residual. Both are parts of what all ranks
    together owe, in the same unit, and so survive a change of owners.

    Cost: 2(N-1)/N · K_c bytes from each rank.
    """
    step, rank = state.step + 1, port.rank
    contribution = _contribution(port, bundle, way)
    _refuse_nonfinite(contribution, way.codec, state.codecs, rank)
    parts = way.striped(bundle, port.size)
    flops = sum(part.flops for part in parts)
    codecs = state.codecs | begun(parts, contribution.views, state.codecs)

    def encode() -> list[Tensor]:
        return [
            part.encode(contribution.views, sliced(part, codecs), step, rank)[0] if owner != rank else _none(bundle)
            for owner, part in enumerate(parts)
        ]

    pieces = await port.compute(encode, flops)
    mine = parts[rank]
    like = torch.empty(mine.num_bytes, dtype=torch.uint8, device=bundle.flat.device)
    likes = [like if sender != rank else _none(bundle) for sender in range(port.size)]
    arrived = await port.all_to_all(pieces, likes)

    def reduce() -> Tensor:
        owed = sliced(mine, codecs)
        take_residual_(mine, contribution.views, owed)
        if way.merge is None:
            total = contribution
            add_others_(mine, total.views, owed, arrived, step, rank)
        else:
            total = merged(way.merge, mine, contribution, arrived, step, rank)
        return mine.encode(total.views, owed, step, rank)[0]

    sum_wire = await port.compute(reduce, mine.flops * port.size)
    longest = max(part.num_bytes for part in parts)
    padded = torch.zeros(longest, dtype=torch.uint8, device=bundle.flat.device)
    padded[: sum_wire.numel()] = sum_wire
    wires = await port.all_gather(padded)

    def decode() -> Tensor:
        out = bundle.with_flat(torch.zeros_like(bundle.flat))
        for owner, (part, wire) in enumerate(zip(parts, wires, strict=True)):
            part.add_(wire, out.views, step, owner)
        return out.flat

    return bundle.with_flat(await port.compute(decode, flops)), Exchanged(step, codecs)


def all_reduce(route: Route) -> Path:
    """Wires are added on their way by `route`, as numbers. The answer lies where the bundle lay.

    Of 16-bit tensors `exact` and `random_k` have wires of 16 bits: sums of these are rounded on their way, which nobody
    owes, and may become infinite. `all_gather` adds them in float32.

    Cost: the route's for K_c bytes; where the codec has a `statistic`, first an all-gather of a number for each tensor.
    """

    async def path(port: Port, bundle: Bundle, state: Exchanged, way: Way) -> tuple[Bundle, Exchanged]:
        contribution = _contribution(port, bundle, way)
        if isinstance(way.codec, Cast | Exact):
            return await _summed(port, route, contribution, way.codec), Exchanged(state.step + 1, state.codecs)
        step, codec, size = state.step + 1, way.codec, port.size
        _refuse_nonfinite(contribution, codec, state.codecs, port.rank)
        views = {name: view for name, view in contribution.views.items() if view.numel()}
        agreed = await _agreed(port, codec, views, state.codecs)
        pieces = whole(views, codec, 0)
        whens = [
            EncodeContext(step, port.rank, piece.number, size, each) for piece, each in zip(pieces, agreed, strict=True)
        ]
        flops = codec.flops * bundle.flat.numel()

        def encode() -> tuple[Tensor, list[Tensor], dict[str, CodecState]]:
            buffer, wires = _rooms(codec, list(views.values()), size)
            after = {}
            for (name, x), when, room in zip(views.items(), whens, wires, strict=True):
                after[name] = _encoded(codec, x, state.codecs.get(name), when, name, room)
            return buffer, wires, after

        buffer, wires, codecs = await port.compute(encode, flops)
        total = await route(port, buffer)

        def decode() -> Tensor:
            contribution.flat.zero_()
            if total.is_meta:
                return contribution.flat
            for out, when, wire in zip(views.values(), whens, total.split([w.numel() for w in wires]), strict=True):
                codec.add_(wire, out, when)
            return contribution.flat

        return contribution.with_flat(await port.compute(decode, flops)), Exchanged(step, state.codecs | codecs)

    return path


async def _summed(port: Port, route: Route, contribution: Bundle, codec: Cast | Exact) -> Bundle:
    """Wires that are the values themselves, element by element: one for the whole buffer, written back over it."""
    flat = contribution.flat
    when, room = EncodeContext(terms=port.size), flat if codec.wire_dtype(flat) is flat.dtype else None
    wire = await port.compute(lambda: codec.encode(flat, None, when, room)[0], codec.flops * flat.numel())
    total = await route(port, wire)

    def decode() -> Tensor:
        smaller = torch.finfo(flat.dtype).max < torch.finfo(total.dtype).max  # only decoding keeps finite what is
        return flat.copy_(codec.decode(total, flat) if smaller and not total.is_meta else total)

    return contribution.with_flat(await port.compute(decode, codec.flops * flat.numel()))


def _rooms(codec: Codec, views: Sequence[Tensor], terms: int) -> tuple[Tensor, list[Tensor]]:
    """Memory for a wire of each tensor, one behind the other, and where each is."""
    dtype = codec.wire_dtype(views[0], terms)
    sizes = [codec.wire_bytes(view, terms) // dtype.itemsize for view in views]
    buffer = torch.empty(sum(sizes), dtype=dtype, device=views[0].device)
    return buffer, list(buffer.split(sizes))


def flushed(bundle: Bundle, state: Exchanged) -> tuple[Bundle, Exchanged]:
    """Alone, nobody needs an encoding: what was owed when there were others is given, and nothing is owed any more."""
    codecs: dict[str, CodecState] = {}
    for name, codec_state in state.codecs.items():
        owed, codecs[name] = _given(codec_state)
        for residual in owed:
            bundle = bundle.with_flat(bundle.flat)
            view = bundle.views[name]
            view.copy_(narrowed(view + residual, view))
    return bundle, Exchanged(state.step, codecs)


def _given(state: CodecState) -> tuple[list[Tensor], CodecState]:
    """What a codec's state owes, and the state without it."""
    if hasattr(state, "given"):  # not all that ranks add up is to be given: `dgc`
        found: tuple[list[Tensor], CodecState] = state.given()
        return found
    if isinstance(state, Residual):
        return ([] if state.residual is None else [state.residual]), Residual()
    if isinstance(state, tuple):
        parts = [_given(each) for each in state]
        values = [after for _, after in parts]
        like = type(state)(*values) if hasattr(state, "_fields") else tuple(values)
        return [residual for owed, _ in parts for residual in owed], like
    return [], state


def _contribution(port: Port, bundle: Bundle, way: Way) -> Bundle:
    """This rank's part of the mean; for a merge, what the rank has."""
    if way.merge is not None:
        return bundle
    share = 1 / port.size if bundle.share is None else bundle.share
    return bundle.with_flat(bundle.scaled(share) if share else torch.zeros_like(bundle.flat))


def _refuse_nonfinite(bundle: Bundle, codec: Codec, states: Mapping[str, CodecState], rank: int) -> None:
    """Before the first tensor is encoded, so that no residual has changed when the last one is refused."""
    if not states or codec.passes_nonfinite or bundle.flat.is_meta or _first_nonfinite(bundle.flat) < 0:
        return
    name, view, index = next(
        (name, view, index) for name, view in bundle.views.items() if (index := _first_nonfinite(view.reshape(-1))) >= 0
    )
    raise NotFinite(codec.name, index, float(view.reshape(-1)[index]), f"{name} on rank {rank}")


def _first_nonfinite(flat: Tensor) -> int:
    if flat.device.type == "cpu" and flat.dtype in DTYPES_CHECKED and available():
        return unfinite(flat)
    bad = (~flat.isfinite()).nonzero()
    return int(bad[0]) if len(bad) else -1


async def _gathered(port: Port, message: Tensor, packing: Packing) -> list[Tensor]:
    if packing.fixed:
        return await port.all_gather(message)
    if message.is_meta:
        await port.all_gather(torch.tensor([message.numel()]))
        return await port.all_gather(message)
    lengths = [int(n) for n in await port.all_gather(torch.tensor([message.numel()], device=message.device))]
    padded = message.new_zeros(max(lengths))
    padded[: message.numel()] = message
    return [m[:n] for m, n in zip(await port.all_gather(padded), lengths, strict=True)]


def _total(packing: Packing, messages: Sequence[Tensor], bundle: Bundle, step: int) -> Tensor:
    """The sum of what the messages say, flat, in the order of ranks.

    16 bits are added in float32, and what is finite stays so. A codec adds to tensors of the dtype that it encoded:
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


async def _agreed(
    port: Port, codec: Codec, views: Mapping[str, Tensor], states: Mapping[str, CodecState]
) -> list[float | None]:
    """For each tensor the largest statistic of all ranks."""
    if any(view.is_meta for view in views.values()):
        if codec.statistic(torch.zeros(1), codec.init(torch.zeros(1))) is not None:
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
    """A codec does not know whose tensor it refuses."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite(error.codec, error.index, error.value, place) from None


def _none(bundle: Bundle) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=bundle.flat.device)
