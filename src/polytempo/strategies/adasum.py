"""Adasum: gradients that agree are averaged, gradients that are orthogonal are added."""

from __future__ import annotations

from polytempo import aggregation
from polytempo.core import Strategy, spelled


def adasum() -> Strategy:
    """Merge gradients by the adaptive sum, layer by layer, so the learning rate need not be scaled with workers.

    a ⊕ b = (1 - a·b / 2‖a‖²) a + (1 - a·b / 2‖b‖²) b, pairwise over a binary tree of workers.

    Cost: ⌈log₂N⌉ exchanges of the whole gradient.

    Source: S. Maleki et al., "Scaling distributed training with adaptive summation", 2020.
    """
    return Strategy(spelled("adasum"), gradients=aggregation.adasum())
