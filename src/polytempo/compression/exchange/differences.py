"""Differences from estimates that all ranks keep, which get small where training converges.

Source: P. Richtárik, I. Sokolov and I. Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster
error feedback", 2021, algorithm 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from polytempo.compression.encoding.coded import exact
from polytempo.compression.encoding.feedback import feedback
from polytempo.compression.exchange.all_gather import all_gather
from polytempo.compression.exchange.packing import EXACT_BELOW
from polytempo.compression.exchange.reduce_scatter import reduce_scatter
from polytempo.compression.exchange.through import through
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Bundle, Codec, Cost, Port, Promise, Route, Transform
from polytempo.core.calls.refusals import refuse
from polytempo.core.cost import num_bytes, route_name
from polytempo.core.state import narrowed, wide
from polytempo.core.transform import cost_of


class DifferencesState(NamedTuple):
    """Exchanges so far, the number of ranks in the last one (0: none), hᵢ and Σ hᵢ."""

    step: int
    size: int
    own: Bundle
    total: Bundle


def differences(codec: Codec, route: Route | WireRoute | None = None, *, exact_below: int = EXACT_BELOW) -> Transform:
    """hᵢ ← hᵢ + decode(encode(xᵢ - hᵢ)); the answer is h = Σ hᵢ, for xᵢ = shareᵢ · (this rank's values).

    Only differences travel: each rank adds their sum to its copy of h, so that h is the same everywhere. The first
    exchange, and the first among another number of ranks, sends xᵢ as it is. Where x comes to rest, x - h gets small,
    and its encoding's error, too. With a codec that loses nothing h is the mean, to rounding.

    Codes of a sum go by `reduce_scatter`: its owner's rest of the sum is a part of its own hᵢ. So do casts by default:
    routes that add 16-bit wires round their sums, and h would keep the errors, so that these routes are refused.
    Otherwise `route` and `exact_below` are as in `through`. 16-bit tensors are exchanged and kept in float32. With one
    rank nothing is encoded.

    Cost: the codec's, and once a sum of all values. Memory for hᵢ and h. A lost rank leaves its hᵢ in h, so elastic
    runs are refused. Raises ValueError as `feedback` does, for a codec with a memory, and for errors that may be larger
    than the input; `Incompatible` (PT2804) for a cast over a route that adds its wires.
    """
    fed = feedback(codec)  # its residual after one encoding is the part that did not travel
    by = reduce_scatter if route is None and codec.facts.elementwise else route
    coded, whole = through(fed, route=by, exact_below=exact_below), through(feedback(exact()), route=reduce_scatter)
    rounds = codec.facts.elementwise and codec.facts.law.kind != "lossless"
    if rounds and by not in (reduce_scatter, all_gather):
        refuse({"differences", "rounded sums"}, codec=codec.facts.name, route=route_name(by))

    def init(parameters: Bundle) -> DifferencesState:
        own, total = (parameters.map(lambda flat: flat.new_zeros(flat.shape, dtype=wide(flat.dtype))) for _ in range(2))
        return DifferencesState(0, 0, own, total)

    async def apply(port: Port, bundle: Bundle, state: DifferencesState) -> tuple[Bundle | None, DifferencesState]:
        if port.size == 1:
            return bundle, state._replace(size=1)  # the ranks of a later resume would all have this one's hᵢ
        begins = state.size != port.size
        own, total = (torch.zeros_like(h.flat) if begins else h.flat for h in (state.own, state.total))
        share = 1 / port.size if bundle.share is None else bundle.share
        x = bundle.scaled(share).to(own.dtype) if share else torch.zeros_like(own)
        sent = Bundle(bundle.tensors, 1.0, flat=x - own)
        exchange = whole if begins else coded
        found, after = await exchange.apply(port, sent.copy(), exchange.init(sent)._replace(step=state.step))
        assert found is not None, "an exchange answers in every step"
        for name, each in after.codecs.items():
            if each.memory.residual is not None:
                sent.views[name].sub_(each.memory.residual)
        h = state.total.with_flat(total + found.flat)
        answer = bundle.with_flat(bundle.flat.copy_(narrowed(h.flat, bundle.flat)))
        return answer, DifferencesState(after.step, port.size, state.own.with_flat(own + sent.flat), h)

    def cost(parameters: Bundle, num_ranks: int) -> Cost:
        tensors = parameters.tensors.items()
        kept = Bundle({n: torch.empty_like(t, dtype=wide(t.dtype), device="meta") for n, t in tensors})
        begin = cost_of(whole, kept, num_ranks).at(lambda steps: steps.until(1))
        rest = cost_of(coded, kept, num_ranks).at(lambda steps: steps.after(1))
        return begin.plus(rest)._replace(memory_bytes=2 * num_bytes(kept))

    promises = Promise.SEPARABLE | Promise.WEIGHS | Promise.IDLE_ALONE
    return Transform(init, apply, promises, cost, coded.beside)
