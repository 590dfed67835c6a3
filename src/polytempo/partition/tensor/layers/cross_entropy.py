"""The cross entropy of logits that are divided by class, without gathering them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.model_group import ModelGroup

Reduction = Literal["mean", "sum", "none"]


def split_cross_entropy(
    group: ModelGroup,
    logits: Tensor,
    target: Tensor,
    classes: Division,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of all ranks' logits, the same on every rank.

        m_r = max z_r    s_r = Σ exp(z_r - m_r)    t_r = z[target], or 0 where another rank has that class
        m = max m_r      loss = m + ln Σ s_r · exp(m_r - m) - Σ t_r        ∂loss/∂z_r = softmax_r - [target in r]

    `logits` are (…, this rank's classes), `target` (…), with whole classes. Cost of N ranks, for P positions: forward a
    gather of three numbers for each position and rank (four with `label_smoothing`), (N-1) · 3 · P from each; backward
    nothing. Gathered logits would be (N-1) · classes · P / N from each.

    Errors: ValueError for shapes that do not fit, IndexError for a class that there is not.

    Source: M. Shoeybi et al., "Megatron-LM", 2019, section 3; it sums three times instead of gathering once.
    """
    if logits.shape[:-1] != target.shape or logits.shape[-1] != classes.sizes[group.rank]:
        raise ValueError(
            f"rank {group.rank} has {classes.sizes[group.rank]} of {classes.total} classes: logits are to be "
            f"(…, {classes.sizes[group.rank]}) and the target (…); got {tuple(logits.shape)} and {tuple(target.shape)}"
        )
    counted = target != ignore_index
    if not target.is_meta and bool((((target < 0) | (target >= classes.total)) & counted).any()):
        raise IndexError(
            f"there are {classes.total} classes, and targets from {int(target.min())} to {int(target.max())}"
        )
    rows: Tensor = _Rows.apply(logits, target, group, classes, label_smoothing)  # type: ignore[no-untyped-call]
    rows = torch.where(counted, rows, 0.0)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / counted.sum()


class _Rows(torch.autograd.Function):
    """The loss of each position."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: ModelGroup, classes: Division, smoothing: float
    ) -> Tensor:
        begin, end = classes.spans()[group.rank]
        own = (target >= begin) & (target < end)
        place = (target - begin).masked_fill(~own, 0).unsqueeze(-1)
        largest = logits.amax(-1)
        shifted = (logits - largest.unsqueeze(-1)).exp()
        mine = [largest, shifted.sum(-1), logits.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)]
        if smoothing:
            mine.append(logits.sum(-1))
        found = torch.stack(group.all(torch.stack(mine)))  # (ranks, three or four, …)
        most = found[:, 0].amax(0)
        total = (found[:, 1] * (found[:, 0] - most).exp()).sum(0)
        softmax = shifted * ((largest - most).exp() / total).unsqueeze(-1)
        ctx.save_for_backward(softmax, place, own)
        ctx.smoothing, ctx.num_classes = smoothing, classes.total
        loss: Tensor = most + total.log() - (1 - smoothing) * found[:, 2].sum(0)
        return loss - smoothing / classes.total * found[:, 3].sum(0) if smoothing else loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, place, own = ctx.saved_tensors
        expected = own.unsqueeze(-1).to(softmax.dtype) * (1 - ctx.smoothing)
        difference = softmax.scatter_add(-1, place, -expected) - ctx.smoothing / ctx.num_classes
        return difference * gradient.unsqueeze(-1), None, None, None, None
