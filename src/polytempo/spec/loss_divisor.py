"""Divisors of losses: the weight of each part of a batch when the losses of its parts are joined.

mean over samples         Σ nₚ/n · lossₚ          n samples, nₚ of them in part p; the default for a loss
divided by another d      Σ dₚ/Σd · lossₚ         as d = the classes' weights, or the targets that are not ignored
a sum                     Σ lossₚ
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss

from polytempo.spec.job import OfBatch

DivisorOf = Callable[[Any], Any]
"""A number for the target of some samples."""
_IGNORED = -100
"""Targets that torch's cross-entropy leaves out by default."""


class Divisor(NamedTuple):
    """The number that a loss divides by."""

    function: DivisorOf | None
    """None: the loss is a sum."""
    usual: bool = False
    """True if it is the number of samples, or a multiple of it, but for targets that torch ignores by default."""
    of_batch: bool = False
    """True for a function of a pair (input, target), and not of a target: a job's `weight`."""


@dataclass(frozen=True)
class DividedLoss:
    """A loss with its divisor; see `divided_by`."""

    function: Callable[[Any, Any], Tensor]
    divisor: Divisor | None
    """None: it is not known."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The function's answer."""
        return self.function(output, target)


def divided_by(loss: Callable[..., Tensor], divisor: DivisorOf | None) -> Callable[..., Tensor]:
    """Declare the divisor of `loss` if it is not the number of samples: `divisor(target)`; None for a sum.

        loss = lambda output, target: functional.cross_entropy(output, target, ignore_index=0)
        loss = pt.divided_by(loss, lambda target: (target != 0).sum())

    Pipelines cut a batch into micro-batches, and batches that grow come in pieces: the loss of each part counts by its
    divisor, so that they add up to the batch's. torch's own losses are known, also with `functools.partial`: with class
    weights, `ignore_index` and `reduction="sum"`. Others are taken for means over samples. For a loss marked by
    `pt.of_batch`, `divisor` is called with the batch. Ranks count by their samples, as in torch's DDP.
    """
    known = Divisor(divisor)
    return replace(loss, divisor=known) if isinstance(loss, OfBatch) else DividedLoss(loss, known)


def divisor_of(loss: Any) -> Divisor | None:
    """The known divisor: None for functions of the user's, and for means over samples."""
    if isinstance(loss, DividedLoss | OfBatch):
        return loss.divisor
    options: dict[str, Any] = {}
    while isinstance(loss, partial):
        loss, options = loss.func, loss.keywords | options
    if isinstance(loss, _Loss):
        options = {name: getattr(loss, name, None) for name in ("reduction", "weight", "ignore_index")}
    elif getattr(loss, "__module__", None) != functional.__name__:
        return None
    if options.get("reduction") == "sum":
        return Divisor(None)
    if not (
        isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss in (functional.cross_entropy, functional.nll_loss)
    ):
        return None
    weight, ignored = options.get("weight"), options.get("ignore_index", _IGNORED)
    return Divisor(partial(_of_classes, weight, ignored), usual=weight is None and ignored == _IGNORED)


def weights(divisor: Divisor, targets: Sequence[Any]) -> list[float]:
    """Weight of each part's loss in the loss of all. Errors: ValueError for a divisor below 0."""
    if divisor.function is None:
        return [1.0] * len(targets)
    each = torch.stack([torch.as_tensor(divisor.function(target)).double().reshape(()) for target in targets]).tolist()
    if not min(each) >= 0:
        raise ValueError(f"a loss cannot divide by {min(each):g}; pt.divided_by takes a function of the target")
    return in_sum(each) if divisor.of_batch or sum(each) else [1 / len(each)] * len(each)


def in_sum(each: Sequence[float]) -> list[float]:
    """The part of each number in the sum of all; zeros where the sum is 0."""
    total = sum(each)
    return [one / total if total else 0.0 for one in each]


def check_by_samples(loss: object, who: str) -> None:
    """Raise ValueError if it is known that parts of a loss do not count by their samples, as `who` assumes."""
    found = divisor_of(loss)
    if found is not None and not found.usual:
        what = "is a sum" if found.function is None else "divides by something else"
        raise ValueError(
            f"{who} joins the losses of parts of a batch by their samples, and this loss {what}; use a mean over "
            "samples, without class weights and ignore_index"
        )


def _of_classes(weight: Tensor | None, ignored: int, target: Tensor) -> Tensor | int:
    """Divisor of torch's cross-entropy: the weights of the classes of targets that are not ignored."""
    if target.is_floating_point():  # probabilities of classes
        return len(target)
    counts = target != ignored
    return counts.sum() if weight is None else weight.to(target.device)[target[counts]].sum()
