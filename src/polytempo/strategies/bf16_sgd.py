"""bfloat16 SGD: gradients travel as 16-bit floats, and are added on their way."""

from __future__ import annotations

from polytempo.compression import bf16, through
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Route, Strategy, call_name


def bf16_sgd(route: Route | WireRoute | None = None) -> Strategy:
    """Round the gradient to bfloat16, and average it in bfloat16 over any route.

    8 significant bits and the range of float32, so nothing overflows and no loss has to be scaled. Each addition on the
    way rounds again. With one worker nothing is rounded.

    Cost: the route's for half of float32's bytes.

    Source: D. Kalamkar et al., "A study of BFLOAT16 for deep learning training", 2019.
    """
    return Strategy(
        call_name(bf16_sgd, locals()),
        gradients=through(bf16(), route=route),
    )
