"""`through`: a codec, a merge and a route, put together in the only right plan."""

from __future__ import annotations

from typing import NamedTuple

from polytempo.compression.all_gather import all_gather
from polytempo.compression.all_reduce import all_reduce
from polytempo.compression.exchange import Exchanged, ExchangePlan, WireRoute, flushed
from polytempo.compression.packing import EXACT_BELOW
from polytempo.compression.reduce_scatter import reduce_scatter
from polytempo.core import Bundle, Codec, Port, Route, State, Transform, averaging, native
from polytempo.core.checks import check_whole
from polytempo.core.codec import check_codec
from polytempo.core.merge import Merge, check_merge
from polytempo.core.route import check_route
from polytempo.core.transform import Part

_BYTES_TO_SHOW = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_NUMBER_BYTES = 8
"""Of a length, and of a statistic, that ranks tell each other."""


def through(
    codec: Codec,
    merge: Merge | None = None,
    route: Route | WireRoute | None = None,
    *,
    exact_below: int = EXACT_BELOW,
) -> Transform:
    """Encode, exchange, decode, merge. `merge` None: Σᵢ shareᵢ · xᵢ, the mean weighted by samples.

    Without `route` the codec decides:

        wires that may be added (casts, random_k, terngrad)    all-reduce of wires          2(N-1)/N · K_c bytes a rank
        wires that hold a few entries (top_k, threshold, dgc)  all-gather                   (N-1) · K_c
        codes (int8, one_bit, qsgd, …)                         reduce-scatter of codes,     2(N-1)/N · K_c
                                                               sum, encode, all-gather
        a merge that needs whole vectors (krum, vote)          all-gather                   (N-1) · K_c
        wires that vary in length, codecs with a memory        all-gather                   (N-1) · K_c

    `route` may be any route of `collectives` for the first kind, and `compression.all_gather` or
    `compression.reduce_scatter` for all that can take them. Every rank decodes the same wires in the same order, so all
    end with the same bits. Tensors of fewer than `exact_below` elements travel as they are, except on an all-reduce.

    With `feedback` and the mean, what was given is what was answered plus what ranks owe. With a `merge` that holds of
    each rank's own wires only: a vote or a median is no sum, and what it leaves out nobody owes.

    With one rank nothing is encoded. Raises ValueError for what cannot work, TypeError for what is no codec or route.
    """
    check_codec(codec)
    if merge is not None:
        check_merge(merge)
    check_whole(exact_below=exact_below)
    if exact_below < 0:
        raise ValueError(f"exact_below must be a number of elements >= 0, got {exact_below}")
    wire_route = _wire_route(codec, merge, route)
    plan = ExchangePlan(codec, merge, exact_below)
    remembers = codec.facts.memory != "none"

    def init(parameters: Bundle) -> Exchanged:
        return Exchanged(0, {name: codec.init(t) for name, t in parameters.tensors.items()} if remembers else {})

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, Exchanged]:
        if port.size == 1 or not any(tensor.numel() for tensor in bundle.tensors.values()):
            return flushed(bundle, state)
        return await wire_route(port, bundle, state, plan)

    def explain(parameters: Bundle, num_ranks: int) -> list[Part]:
        return _explained(plan, wire_route, route, parameters, num_ranks)

    beside = None if route is None or route in (all_gather, reduce_scatter) else averaging(route)  # type: ignore[arg-type]
    return Transform(init, apply, idle_alone=not remembers, weighs=merge is None, explain=explain, beside=beside)


def _wire_route(codec: Codec, merge: Merge | None, route: Route | WireRoute | None) -> WireRoute:
    """The way that the three allow. Raises ValueError that names what is wrong and the remedy."""
    whole_vectors = merge is not None and not getattr(merge, "coordinate_wise", True)
    if route is None:
        if codec.facts.summable and merge is None:
            return all_reduce(native)
        cut = codec.facts.fixed and not (codec.facts.sparse or whole_vectors or codec.facts.memory == "own")
        return reduce_scatter if cut else all_gather
    if route is all_gather:
        return all_gather
    if route is reduce_scatter:
        _check_stripes(codec, merge, whole_vectors)
        return reduce_scatter
    check_route(route)
    name = getattr(route, "__name__", str(route))
    if merge is not None:
        merge_name = getattr(merge, "__name__", str(merge))
        raise ValueError(f"{merge_name} is no sum, so route={name} is impossible; use route=all_gather, or none")
    if not codec.facts.summable:
        raise ValueError(
            f"{codec.facts.name} wires cannot be summed, so route={name} is impossible; use route=all_gather, or, "
            "better, leave out route: then the codec chooses"
        )
    return all_reduce(route)  # type: ignore[arg-type]


def _check_stripes(codec: Codec, merge: Merge | None, whole_vectors: bool) -> None:
    if whole_vectors:
        name = getattr(merge, "__name__", str(merge))
        raise ValueError(
            f"{name} needs whole vectors (or ties that a code can say), and reduce_scatter cuts them; use "
            "route=all_gather"
        )
    if not codec.facts.fixed:
        raise ValueError(
            f"{codec.facts.name} wires vary in length, which the owner of a stripe must know; use route=all_gather"
        )
    if codec.facts.memory == "own":
        raise ValueError(
            f"{codec.facts.name} remembers more than a residual, which cannot be cut into stripes; use route=all_gather"
        )


class _Cost(NamedTuple):
    """What one exchange takes, in bytes: the wires of one rank, and what the busiest rank sends (None: the route's)."""

    wires: int
    sent: int | None
    most: bool


def _cost(
    plan: ExchangePlan, wire_route: WireRoute, route: Route | WireRoute | None, parameters: Bundle, num_ranks: int
) -> _Cost:
    """Bytes as a world counts them, agreements on lengths and on statistics included."""
    packing, others = plan.packing(parameters), num_ranks - 1
    if wire_route is all_gather:
        lengths = 0 if packing.fixed else _NUMBER_BYTES
        return _Cost(packing.num_bytes, others * (packing.num_bytes + lengths), not packing.fixed)
    if wire_route is reduce_scatter:
        sizes = [part.num_bytes for part in plan.striped(parameters, num_ranks)]
        return _Cost(packing.num_bytes, sum(sizes) - min(sizes) + others * max(sizes), False)
    codec, tensors = plan.codec, [like for like in parameters.views.values() if like.numel()]
    wires = sum(codec.wire_bytes(like, num_ranks) for like in tensors)
    statistics = len(tensors) if codec.facts.statistic is not None else 0
    sent = round(2 * others / num_ranks * wires) + others * _NUMBER_BYTES * statistics
    return _Cost(wires, sent if route is None or route is native else None, False)


def _explained(
    plan: ExchangePlan, wire_route: WireRoute, route: Route | WireRoute | None, parameters: Bundle, num_ranks: int
) -> list[Part]:
    """What a step sends, and why on this plan."""
    if num_ranks == 1:
        return [Part([f"{plan.codec.facts.name}: nothing is sent, and nothing is encoded, by one worker alone"], True)]
    cost = _cost(plan, wire_route, route, parameters, num_ranks)
    plain = parameters.flat.numel() * parameters.flat.element_size()
    ring = 2 * (num_ranks - 1) / num_ranks
    most = "at most " if cost.most else ""
    if wire_route is all_gather:
        how = f"all-gather, {most}{shown(cost.wires)} of wires to each of {num_ranks - 1} others"
        why = _why_all_gather(plan)
    elif wire_route is reduce_scatter:
        how = f"reduce-scatter of {shown(cost.wires)} of codes, sum, all-gather of the sum's codes"
        why = "codes cannot be added, but the owner of a stripe can decode, add and encode again"
    else:
        how = f"all-reduce of {shown(cost.wires)} of wires by {getattr(route or native, '__name__', route)}"
        why = "the wires are numbers, and their sum decodes to the sum of the tensors"
    if cost.sent is None:
        sends = f"each message is as long as wires of {shown(cost.wires)} make it; uncompressed {shown(plain)}, "
        factor = plain / max(1, cost.wires)
    else:
        sends = f"each rank sends {most}{shown(cost.sent)}; uncompressed, by a ring, {shown(ring * plain)}, "
        factor = ring * plain / max(1, cost.sent)
    if wire_route is route and wire_route is not _wire_route(plan.codec, plan.merge, None):
        why = f"route={wire_route.__name__} was asked for"
    lines = [f"{plan.codec.facts.name}: {how}", f"because {why}", f"{sends}{factor:.3g} times as much"]
    return [Part(lines, says_bytes=cost.sent is not None)]


def _why_all_gather(plan: ExchangePlan) -> str:
    if plan.merge is not None:
        return f"{getattr(plan.merge, '__name__', plan.merge)} compares what all ranks have"
    if plan.codec.facts.sparse:
        return "wires of different ranks hold different entries, so a sum would be denser than each"
    if plan.codec.facts.memory == "own":
        return "the codec remembers more than a residual, which cannot be cut into stripes"
    return "every rank decodes every other's wire, once, and nothing is encoded twice"


def shown(num_bytes: float) -> str:
    """Bytes as a person reads them: `1.24 MB`."""
    for unit, name in _BYTES_TO_SHOW:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} bytes"
