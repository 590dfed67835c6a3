"""1-bit SGD: a gradient's signs travel, with two numbers a row, and the rest goes with the next gradient."""

from __future__ import annotations

from polytempo.compression import feedback, one_bit, through
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Strategy, call_name


def one_bit_sgd(route: WireRoute | None = None, exact_below: int = 1024) -> Strategy:
    """Send one bit for each number of the gradient, in both directions, and keep the errors for the next step.

    v = g + r; each row of v becomes its signs, the mean of its entries ≥ 0 and the mean of the others; r ← v - v̂.
    Without a `route`, the owner of a stripe adds the ranks' codes and encodes the sum again, with a second residual;
    `all_gather` sends every code to all ranks instead, and encodes once. Tensors of fewer than `exact_below` elements
    travel as they are. With one worker nothing is encoded.

    Cost: 2(N-1)/N · (1/32 of float32's bytes, and 8 bytes a row); memory for one more gradient, in
    float32 where that has 16 bits.
    Change the learning rate in small steps: the residual was computed with the one before.

    Source: F. Seide, H. Fu, J. Droppo, G. Li and D. Yu, "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs", 2014. There groups are the columns of matrices stored by column.
    """
    transform = through(feedback(one_bit()), route=route, exact_below=exact_below)
    return Strategy(call_name(one_bit_sgd, locals()), gradients=transform)
