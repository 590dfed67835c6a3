"""TernGrad: every number of the gradient becomes -s, 0 or s, by chance, so that the mean is right."""

from __future__ import annotations

from polytempo import compression
from polytempo.compression import through
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Route, Strategy, call_name


def terngrad(clip: float | None = 2.5, seed: int = 0, route: Route | WireRoute | None = None) -> Strategy:
    """Numbers become s · sign(g) with probability |g|/s and 0 otherwise; s is the largest |g| of all workers.

    Before, each tensor is clipped to `clip` standard deviations, which makes s small and the expectation slightly
    wrong (a Gaussian's length by 1 %). All workers share s, one for each tensor, so their codes can be summed as
    integers on their way. Without a `route` they are. With one worker nothing is encoded.

    Cost: an all-gather of one number a tensor, then the route's for a few bits a number (enough for a sum of N).

    Source: W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen and H. Li, "TernGrad: ternary gradients to reduce
    communication in distributed deep learning", 2017, sections 3 and 4. It recommends less weight decay and dropout.
    """
    codec = compression.terngrad(clip=clip, seed=seed)
    return Strategy(
        call_name(terngrad, locals()),
        gradients=through(codec, route=route),
    )
