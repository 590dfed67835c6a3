"""8-bit SGD: gradients travel as bytes, each block with a scale of its own."""

from __future__ import annotations

from polytempo.compression import dynamic8, int8, through
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Strategy, call_name


def int8_sgd(
    block: int = 256, dynamic: bool = False, route: WireRoute | None = None, exact_below: int = 1024
) -> Strategy:
    """Send one byte for each number of the gradient: linear steps of its block's largest, or `dynamic` ones.

    Linear: x̂ = round(127 x / max|x|) · max|x| / 127, fine for blocks of similar numbers. With `dynamic`, the byte is a
    sign, a decimal exponent and a fraction, so small numbers keep their digits over seven orders of magnitude. Without
    a `route`, the owner of a stripe adds the ranks' codes and encodes the sum; with `all_gather` it is encoded once.
    Tensors of fewer than `exact_below` elements travel as they are. With one worker nothing is encoded.

    Cost: 2(N-1)/N · (1/4 of float32's bytes, and 4 bytes a block).

    Source: T. Dettmers, "8-bit approximations for parallelism in deep learning", 2016, which normalises whole tensors;
    blocks as in T. Dettmers, M. Lewis, S. Shleifer and L. Zettlemoyer, "8-bit optimizers via block-wise quantization",
    2022.
    """
    codec = dynamic8(block=block) if dynamic else int8(block=block)
    return Strategy(
        call_name(int8_sgd, locals()),
        gradients=through(codec, route=route, exact_below=exact_below),
    )
