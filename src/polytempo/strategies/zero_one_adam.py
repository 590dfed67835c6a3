"""0/1 Adam: Adam with a second moment that changes ever more rarely, signs for sums, and local steps afterwards."""

from __future__ import annotations

from polytempo.aggregation import from_anchor, mean, rare_variance
from polytempo.compression import feedback, one_bit, through
from polytempo.core import Strategy, call_name
from polytempo.synchronization import rarer


def zero_one_adam(
    freeze_step: int = 100,
    repeats: int = 16,
    longest: int = 16,
    beta1: float = 0.0,
    beta2: float = 0.999,
    eps: float = 1e-8,
    scale: float = 0.001,
    exact_below: int = 1024,
) -> Strategy:
    """One bit a number from the first steps on; after T = `freeze_step` steps exchanges come ever more rarely, too.

        exact steps      v ← β₂ v + (1 - β₂) g², g the mean      1, 2, 4, … steps apart, `repeats` times each
        others, up to T  g is r times the mean of gᵢ / r by 1-bit codes with feedback in both directions, r = √v̂ + ε
        later            g is the worker's own, and v stays
        each step        m ← β₁ m + (1 - β₁) g; the optimizer's gradient is scale · m̂ / (√v̂ + ε)
        meetings         θᵢ ← φ - the mean of φ - θᵢ by such codes, φ = θ at the meeting before      after T, 1, 2, 4, …
                         steps apart, `repeats` times each, then always H = `longest` steps

    The optimizer's momentum is Adam's first moment: SGD's rate of 0.1 with a momentum of 0.9 is Adam's 0.001 with
    β₁ = 0.9, and while v stays the same but for the first steps' correction. For an optimizer without momentum take
    `beta1=0.9, scale=0.01`. Both together are refused: steps of a size that no gradient sets swing on through two
    momenta.

    Moments are corrected for their first steps. While all steps are exact it is torch's Adam at `scale` times the
    learning rate, to rounding; with exact codes and H = 1, N workers make the steps of one with the joined batch,
    because all is linear in m while v stays. An element without a gradient in exact steps has v = 0, and waits: a sign
    has no zero. The codes' errors of the first T steps end with them.

    Elastic runs refuse it: each worker steps by a momentum of its own between exchanges.

    Cost: synchronous SGD's in exact steps, `one_bit_sgd`'s in others up to T, then that once in H steps; up to T
    also a number for each tensor, which says if any worker has its gradient; memory for m, v, φ and both residuals.

    Source: Y. Lu, C. Li, M. Zhang, C. De Sa and Y. He, "Maximizing communication efficiency for large-scale training
    via 0/1 Adam", 2022. Deviations: intervals between meetings double after so many meetings, where DeepSpeed's do
    after so many steps. Codes are of gᵢ / r and of the movement φ - θᵢ: both have elements of similar sizes; there they
    are of gᵢ and of √v times the movement, and a small v divides an error as large as others' gradients. A worker keeps
    its m at a meeting, as inner optimizers in `diloco` do; there m becomes the movement's mean in a step.
    """
    sign = through(feedback(one_bit()), exact_below=exact_below)
    return Strategy(
        call_name(zero_one_adam, locals()),
        gradients=rare_variance(freeze_step, repeats, mean(), sign, (beta1, beta2), eps, scale),
        parameters=rarer(longest, repeats, from_anchor(sign), freeze_step),
        synchronized=False,
        momentum=beta1,
    )
