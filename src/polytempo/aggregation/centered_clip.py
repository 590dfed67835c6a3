"""Centered clipping: the mean of the ranks' differences from the last answer, none of them longer than τ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from polytempo.core import call_name
from polytempo.core.arithmetic.merge import Merge
from polytempo.core.calls.typed_arguments import check_real, check_whole


def centered_clip(tau: float = 10.0, iterations: int = 1) -> Merge:
    """c ← c + (1/N) Σᵢ min(1, τ / ‖xᵢ - c‖) (xᵢ - c), `iterations` times from the last answer c; 0 at first.

    So f wrong ranks of N move the answer by f τ / N in an iteration at most; a rank with infinities or NaN moves it by
    nothing. τ = inf is the mean. A small τ needs many steps, or iterations, to follow the right ranks: take their
    distance from each other. Momenta are nearer to each other than gradients, so let ranks send these:
    `robust_sgd(centered_clip(tau), momentum=0.9)`.

    It remembers c, so it is a merge of `merged`, and neither of codes nor of rounds of clients. Running statistics are
    merged by the `median`. Stages of a pipeline, and fragments of a model, each have a c, and τ counts for each.

    Source: S. P. Karimireddy, L. He and M. Jaggi, "Learning from history for Byzantine robust optimization", 2021,
    algorithms 1 and 2. Deviation: every rank gathers all, and computes c itself.
    """
    check_real(tau=tau)
    check_whole(iterations=iterations)
    if not tau > 0 or iterations < 1:
        raise ValueError(f"centered_clip needs tau above 0 and at least 1 iteration, got {tau} and {iterations}")

    def merge(buffers: Sequence[Tensor], last: Tensor) -> Tensor:
        stacked, center = torch.stack(list(buffers)), last
        for _ in range(iterations):
            moved = stacked - center
            lengths = moved.norm(dim=1, keepdim=True)
            part = (tau / lengths).clamp(max=1.0)
            center = center + (moved * part).where(lengths.isfinite(), 0.0).mean(dim=0)
        return center

    merge.__name__ = call_name(centered_clip, locals())
    merge.coordinate_wise = False  # type: ignore[attr-defined]
    merge.from_last = True  # type: ignore[attr-defined]
    return cast("Merge", merge)
