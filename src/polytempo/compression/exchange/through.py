"""`through`: a codec, a merge and a route, put together in the only right plan, and its cost as a world counts it."""

from __future__ import annotations

from polytempo.compression.exchange.all_gather import all_gather
from polytempo.compression.exchange.all_reduce import all_reduce
from polytempo.compression.exchange.packing import EXACT_BELOW, Packing
from polytempo.compression.exchange.reduce_scatter import reduce_scatter
from polytempo.compression.exchange.wire_route import Exchanged, ExchangePlan, WireRoute, flushed
from polytempo.core import (
    Bundle,
    Codec,
    Cost,
    Exchange,
    Port,
    Promise,
    Route,
    Sent,
    State,
    Sum,
    Transform,
    averaging,
    native,
)
from polytempo.core.arithmetic.merge import Merge, begins_at_last, check_merge, least_ranks
from polytempo.core.calls.refusals import refuse
from polytempo.core.calls.typed_arguments import check_whole
from polytempo.core.codec import check_codec
from polytempo.core.cost import Reason, gathered, route_name
from polytempo.core.route import check_route


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

    With `feedback` and the mean, the inputs are the answers plus the residuals. With a `merge` that holds for each
    rank's own wires only: a vote or a median is not a sum, and its rest is not in any rank's residual.

    With one rank nothing is encoded. Raises ValueError for an impossible combination (`Incompatible`, PT2803, for a
    merge that begins at its last answer), TypeError for another thing than a codec or route.
    """
    check_codec(codec)
    if merge is not None:
        check_merge(merge)
        if begins_at_last(merge):
            refuse({"merge with memory", "codec"}, merge=route_name(merge), codec=codec.facts.name)
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

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        by = native if route is None or route in (all_gather, reduce_scatter) else route
        found = exchange_cost(plan, wire_route, by, parameters, num_ranks)  # type: ignore[arg-type]
        asked = wire_route is route and wire_route is not _wire_route(codec, merge, None)
        return found.because("asked") if asked else found

    beside = None if route is None or route in (all_gather, reduce_scatter) else averaging(route)  # type: ignore[arg-type]
    promises = Promise.SEPARABLE
    if not remembers:
        promises |= Promise.IDLE_ALONE
    if merge is None:
        promises |= Promise.WEIGHS
    return Transform(init, apply, promises, cost, beside, least_ranks=least_ranks(merge))


def _wire_route(codec: Codec, merge: Merge | None, route: Route | WireRoute | None) -> WireRoute:
    """The route for the three. Raises ValueError that names the mistake and the remedy."""
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
        raise ValueError(f"{merge_name} is not a sum, so route={name} is impossible; use route=all_gather, or none")
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


_NUMBER_BYTES = 8
"""Bytes of a length, and of a statistic, between ranks."""


def exchange_cost(plan: ExchangePlan, wire_route: WireRoute, route: Route, parameters: Bundle, num_ranks: int) -> Cost:
    """Cost of an exchange in every step; `route` carries the sum, where wires are added."""
    if num_ranks == 1:
        return Cost()
    if wire_route is all_gather:
        return _gathered(plan, parameters, num_ranks)
    if wire_route is reduce_scatter:
        return _scattered(plan, parameters, num_ranks)
    return _added(plan, route, parameters, num_ranks)


def _gathered(plan: ExchangePlan, parameters: Bundle, num_ranks: int) -> Cost:
    packing = plan.packing(parameters)
    sent = gathered(packing.num_bytes, num_ranks)
    if not packing.fixed:
        lengths = gathered(_NUMBER_BYTES, num_ranks)
        sent = sent.plus(lengths._replace(payload_bytes=0, metadata_bytes=lengths.payload_bytes))
    flops = packing.flops * (1 + num_ranks)
    name = plan.codec.facts.name
    found = Exchange("all_gather", sent, flops=flops, exact=packing.fixed, codec=name, reason=_why_gathered(plan))
    return Cost((found,), _state_bytes([packing], parameters))


def _scattered(plan: ExchangePlan, parameters: Bundle, num_ranks: int) -> Cost:
    parts, others = plan.striped(parameters, num_ranks), num_ranks - 1
    sizes = [part.num_bytes for part in parts]
    there = Sent(num_ranks, others * sum(sizes), busiest_bytes=sum(sizes) - min(sizes), rounds=others)
    back = gathered(max(sizes), num_ranks)
    flops = 2 * sum(part.flops for part in parts) + num_ranks * max(part.flops for part in parts)
    name = plan.codec.facts.name
    found = Exchange("reduce_scatter", there.plus(back), flops=flops, codec=name, reason="stripes")
    return Cost((found,), _state_bytes(parts, parameters))


def _added(plan: ExchangePlan, route: Route, parameters: Bundle, num_ranks: int) -> Cost:
    facts, tensors = plan.codec.facts, [t for t in parameters.tensors.values() if t.numel()]
    numel = sum(t.numel() for t in tensors)
    itemsize = plan.codec.wire_dtype(tensors[0], num_ranks).itemsize if tensors else 4
    wires = sum(plan.codec.wire_bytes(t, num_ranks) for t in tensors)
    scales = gathered(_NUMBER_BYTES * len(tensors), num_ranks) if facts.statistic is not None else Sent()
    found = Exchange(
        route_name(route),
        scales._replace(payload_bytes=0, metadata_bytes=scales.payload_bytes),
        (Sum(route, wires // itemsize, itemsize),),
        flops=2 * facts.flops * numel,
        codec=facts.name,
        reason="sum",
    )
    return Cost((found,), sum(facts.state_bytes(t) for t in tensors))


def _why_gathered(plan: ExchangePlan) -> Reason:
    if plan.merge is not None:
        return "merge"
    if plan.codec.facts.sparse:
        return "sparse"
    return "memory" if plan.codec.facts.memory == "own" else "wires"


def _state_bytes(parts: list[Packing], parameters: Bundle) -> int:
    """Bytes of codecs' states; residuals are of whole tensors, stripes or not."""
    encoded = {piece.name: piece.codec for part in parts for piece in part.pieces}
    return sum(codec.facts.state_bytes(parameters.tensors[name]) for name, codec in encoded.items())
