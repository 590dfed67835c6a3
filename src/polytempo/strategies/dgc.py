"""Deep Gradient Compression: a thousandth of each gradient, with the momentum kept where the rest waits."""

from __future__ import annotations

from polytempo import compression
from polytempo.compression import through
from polytempo.core import Strategy, call_name


def dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    clip: float | None = None,
    warmup_steps: int = 0,
    exact_below: int = 1024,
) -> Strategy:
    """Every worker has momentum of its own, and sends the largest entries of its accumulated sum, a `ratio` of them.

    u ← m·u + g; v ← v + u; the largest |v| travel, and there u ← 0, v ← 0. `clip`: a bound for the norm of a tensor's g
    on each worker, before (of its part of the mean). In the first `warmup_steps` steps more is sent, ever less. See
    `compression.dgc`. Tensors of fewer than `exact_below` elements send all of u, and keep it.

    **Give the job plain SGD.** Momentum happens here; an optimizer with momentum (Adam's first moment is a kind of it)
    would apply it twice, and is refused (ValueError) unless `momentum` is 0 here, with any number of workers. Weight
    decay then has no momentum (the authors' optimizer has it for that part alone). With one worker nothing is left out,
    and there is no momentum: its steps are 1/(1 - m) times shorter.

    Cost: (N-1) · ratio · n entries of 8 bytes from each worker; memory for two more gradients.

    Source: Y. Lin, S. Han, H. Mao, Y. Wang and W. J. Dally, "Deep gradient compression: reducing the communication
    bandwidth for distributed training", 2018. There the warm-up lasts four epochs.
    """
    codec = compression.dgc(ratio, momentum, clip, warmup_steps, dense_below=exact_below)
    return Strategy(
        call_name(dgc, locals()),
        gradients=through(codec, exact_below=0),
        momentum=momentum,
    )
