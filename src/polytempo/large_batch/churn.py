"""How much the predictions of two models differ that were trained alike."""

from __future__ import annotations

from torch import Tensor


def churn(one: Tensor, other: Tensor) -> float:
    """The mean over samples of ½ Σ |p - p'|, from 0 to 1: what part of its probability a model would give otherwise.

    `one`, `other`: probabilities of shape (samples, classes), of two runs that differ in their seeds. With two classes
    it is the mean of |p - p'|. Errors: ValueError for other shapes.
    Source: R. Anil et al., "Large scale distributed neural network training through online distillation", 2018,
    section 4.
    """
    if one.ndim != 2 or one.shape != other.shape:
        shapes = f"{tuple(one.shape)} and {tuple(other.shape)}"
        raise ValueError(f"churn compares probabilities of shape (samples, classes), got {shapes}")
    return float((one.double() - other.double()).abs().sum(1).mean() / 2)
