"""`NoiseProbe`: how an attached loop's gradient noise scale is measured."""

from __future__ import annotations

from typing import NamedTuple


class NoiseProbe(NamedTuple):
    """What a loop of one's own says to have its noise scale measured.

    handle = pt.attach(model, optimizer, strategy, noise_scale=pt.large_batch.NoiseProbe(batch_size=32))
    """

    batch_size: int
    """Samples of this rank in a step, those of all passes where gradients accumulate."""
    every: int = 32
    """Steps between two looks."""
