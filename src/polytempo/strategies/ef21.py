"""EF21: the largest differences between gradients and estimates of them, which all workers keep."""

from __future__ import annotations

from polytempo.compression import differences, top_k
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Codec, Route, Strategy, call_name


def ef21(
    codec: Codec | None = None,
    route: Route | WireRoute | None = None,
    exact_below: int = 1024,
) -> Strategy:
    """Send the difference of the gradient from its estimate, and step by the mean estimate.

    hᵢ ← hᵢ + decode(encode(gᵢ - hᵢ)); the optimizer's gradient is mean hᵢ; hᵢ starts as gᵢ, sent in full. `codec` is
    `top_k(0.1)` by default. Each worker keeps hᵢ and the mean. With a codec that loses nothing it is
    synchronous SGD.

    Where workers have different data and no noise, their gradients stay different at the minimum: with `feedback`
    (`top_k_sgd`) these go on to travel in parts, and at a constant learning rate training stops at a distance. Here
    the messages vanish, and it comes as near as synchronous SGD. For noise of small batches EF21-SGDM sends a moving
    average of gradients, by `chain(moving_average(0.9), differences(codec))` as `gradients` of your own strategy.

    With small batches, or an optimizer with momentum, estimates that get a hundredth of a difference in each step
    follow too slowly, and training diverges: `simulate` of `digits`, 4 workers, 200 steps, its SGD with momentum 0.9,
    seeds 0, 1, 2 ends at losses of 8.07, 17.5, 12.6 with `top_k(0.01)`, and 0.05, 0.07, 0.06 with `top_k(0.1)`.

    Refused by elastic runs: a lost worker's hᵢ would stay in the mean. A run that is resumed with another number of
    workers begins again with gradients in full. With one worker nothing is encoded.

    Cost: synchronous SGD's once, then the codec's: by default (N-1) · 20 % of float32's bytes, where synchronous SGD
    has 2(N-1)/N, so that 10 workers gain nothing. Memory for two gradients in float32.

    Source: P. Richtárik, I. Sokolov and I. Fatkhullin, "EF21: a new, simpler, theoretically better, and practically
    faster error feedback", 2021; I. Fatkhullin, A. Tyurin and P. Richtárik, "Momentum provably improves error
    feedback!", 2023. Deviation: hᵢ is of the gradient times the worker's share of the batch. Tensors of fewer than
    `exact_below` elements travel as they are.
    """
    meet = differences(top_k(0.1) if codec is None else codec, route, exact_below=exact_below)
    return Strategy(call_name(ef21, locals()), gradients=meet)
