"""DeMo: the momentum stays with the worker, and its largest frequencies are sent and taken off."""

from __future__ import annotations

from polytempo.aggregation import signs
from polytempo.compression import chunk_top_k, feedback, through
from polytempo.core import Strategy, call_name, chain


def demo(
    ratio: float = 0.0078125,
    decay: float = 0.99,
    scale: float = 0.01,
    bits: int | None = None,
    rotated: bool = True,
    exact_below: int = 1024,
) -> Strategy:
    """Send the largest cosine components of a momentum that ranks never agree on, and step by the sign of their mean.

    mᵢ ← β mᵢ + gᵢ; cᵢ = the `ratio` largest of DCT(mᵢ), chunk by chunk; mᵢ ← mᵢ - DCT⁻¹(cᵢ); the optimizer's gradient
    is `scale` · sign(mean DCT⁻¹(cᵢ)), β = `decay`. See `compression.chunk_top_k` for `bits` and `rotated`.
    The optimizer's learning rate, weight decay and momentum act as on any gradient. By the default scale, a hundredth,
    SGD's usual learning rate does. The learning rate is not within m, so a schedule does not weigh the past
    again. With ratio=1 and β → 0 it is the sign of the mean gradient. Tensors of fewer than `exact_below` elements
    travel as they are, without momentum. With one worker nothing is left out: it is the gradient's sign.

    Every rank decodes all wires in the order of ranks, so that sums are the same; ranks with other processors may
    compute other last bits of the transform, which the check for drift reports.

    Cost: an all-gather of the wires: by default (N-1) · 1.1 % of float32's bytes, a third of that with 2 bits; memory
    for m.

    Source: B. Peng, J. Quesnelle and D. P. Kingma, "DeMo: decoupled momentum optimization", 2024, algorithm 1.
    Deviations: β is 0.99 in place of 0.999, and chunks follow the flat tensor; the mean is over all workers, where the
    released code's is over an element's senders, which a sign hides but for elements that several sent.
    """
    codec = chunk_top_k(ratio, bits, rotated)
    meet = through(feedback(codec, decay), exact_below=exact_below)
    return Strategy(call_name(demo, locals()), gradients=chain(meet, signs(scale)))
