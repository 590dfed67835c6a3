"""What an exchange of wires costs, by the route that they take: as a world counts it, agreements included."""

from __future__ import annotations

from polytempo.compression.exchange.all_gather import all_gather
from polytempo.compression.exchange.packing import Packing
from polytempo.compression.exchange.reduce_scatter import reduce_scatter
from polytempo.compression.exchange.wire_route import ExchangePlan, WireRoute
from polytempo.core import Bundle, Cost, Exchange, Route, Sent, Sum
from polytempo.core.cost import Reason, gathered, route_name

_NUMBER_BYTES = 8
"""Of a length, and of a statistic, that ranks tell each other."""


def exchange_cost(plan: ExchangePlan, wire_route: WireRoute, route: Route, parameters: Bundle, num_ranks: int) -> Cost:
    """Of one exchange in every step; `route` is that of the sum, where wires are added."""
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
    """What codecs remember of the tensors that they encode; residuals are of whole tensors, stripes or not."""
    encoded = {piece.name: piece.codec for part in parts for piece in part.pieces}
    return sum(codec.facts.state_bytes(parameters.tensors[name]) for name, codec in encoded.items())
