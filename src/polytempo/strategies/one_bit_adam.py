"""1-bit Adam: Adam until its second moment is steady; from then on signs of the first moment travel."""

from __future__ import annotations

from polytempo.aggregation import frozen_adam, mean
from polytempo.compression import feedback, one_bit, through
from polytempo.core import Strategy, call_name


def one_bit_adam(
    warmup_steps: int = 100,
    beta1: float = 0.0,
    beta2: float = 0.999,
    eps: float = 1e-8,
    scale: float = 0.001,
    exact_below: int = 1024,
) -> Strategy:
    """Adam with mean gradients for T = `warmup_steps` steps; then v stays, and one bit an element of m travels.

    Later steps: mᵢ = β₁ m + (1 - β₁) gᵢ; m ← the mean of mᵢ by 1-bit codes, with feedback in both directions as in
    `one_bit_sgd`. The optimizer's gradient is scale · m̂ / (√v̂ + ε). The paper's T is 15 to 25 % of a run.

    The optimizer's momentum is Adam's first moment, and m then the gradient: SGD's rate of 0.1 with a momentum of 0.9
    is Adam's 0.001 with β₁ = 0.9, and while v stays the same but for the first steps' correction. For an optimizer
    without momentum take `beta1=0.9, scale=0.01`, and m itself travels. Both together are refused: steps of a size that
    no gradient sets swing on through two momenta.

    Both moments are corrected for their first steps, so with β₁ here it is torch's Adam until step T, at `scale` times
    the learning rate, to rounding; v̂ is corrected for T steps from then on. An element without a gradient in T steps
    has v = 0, and stays: a sign has no zero, and its error would be divided by ε.

    Cost: synchronous SGD's for T steps, then `one_bit_sgd`'s; memory for m, v and the residuals.

    Source: H. Tang, S. Gan, A. A. Awan et al., "1-bit Adam: communication efficient large-scale training with Adam's
    convergence speed", 2021. Deviations: β₁ is the optimizer's by default; DeepSpeed's code does not correct moments.
    """
    coded = through(feedback(one_bit()), exact_below=exact_below)
    return Strategy(
        call_name(one_bit_adam, locals()),
        gradients=frozen_adam(warmup_steps, mean(), coded, (beta1, beta2), eps, scale),
        momentum=beta1,
    )
