"""What a job asks of its model on one batch: the loss to descend, and which predictions are right.

loss(output, target)          a batch is a pair (input, target), and output = model(input)
of_batch(loss)(model, batch)  a batch is whatever the loss understands
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from polytempo.torch.job import Job, OfBatch

_MOST_NAMED = 6
"""Parts of a batch that an error names."""


class Judged(NamedTuple):
    """What a job says of a model's answers to one batch."""

    loss: Tensor
    """The mean over the batch."""
    right: Tensor | None
    """What the job's `correct` answers; None where it has none."""


def loss_of(job: Job, model: nn.Module, batch: Any) -> Tensor:
    """The mean loss of `model` on `batch`. Raises ValueError for a batch or a loss that the job's form cannot be."""
    if isinstance(job.loss, OfBatch):
        return _checked(job.loss(model, batch), "loss(model, batch)")
    inputs, targets = pair_of(batch)
    return _checked(job.loss(model(inputs), targets), "loss(output, target)")


def judged(job: Job, model: nn.Module, batch: Any) -> Judged:
    """Loss and right predictions of `model` on `batch`: one forward pass for both where the batch is a pair."""
    loss, correct = job.loss, job.correct
    output = target = None
    if not (isinstance(loss, OfBatch) and (correct is None or isinstance(correct, OfBatch))):
        inputs, target = pair_of(batch)
        output = model(inputs)
    if isinstance(loss, OfBatch):
        value = _checked(loss(model, batch), "loss(model, batch)")
    else:
        value = _checked(loss(output, target), "loss(output, target)")
    if correct is None:
        return Judged(value, None)
    return Judged(value, correct(model, batch) if isinstance(correct, OfBatch) else correct(output, target))


def pair_of(batch: Any) -> Sequence[Any]:
    """The batch as (input, target), which `loss(output, target)` needs. Raises ValueError for anything else."""
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
        return batch
    raise ValueError(
        f"loss(output, target) needs batches that are pairs (input, target), but this one is {described(batch)}; "
        "let the job have loss=pt.of_batch(lambda model, batch: ...), which is called with the whole batch, or give "
        "its data a collate function that makes pairs"
    )


def described(value: Any) -> str:
    """A batch in a few words: what it is made of, with shapes and dtypes.

    >>> described({"input_ids": torch.zeros(4, 7, dtype=torch.int64), "labels": [1, 2]})
    "a dict with 'input_ids': int64 (4, 7), 'labels': a list of 2"
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        parts = [f"{key!r}: {described(part)}" for key, part in value.items()]
        return f"a {type(value).__name__} with {_listed(parts)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [described(part) for part in value if isinstance(part, Tensor | Mapping)]
        return f"a {type(value).__name__} of {len(value)}" + (f" ({_listed(parts)})" if parts else "")
    return f"a {type(value).__name__}"


def _listed(parts: list[str]) -> str:
    more = len(parts) - _MOST_NAMED
    return ", ".join(parts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _checked(loss: Any, form: str) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else described(loss)
    remedy = "take its mean" if isinstance(loss, Tensor) else "if it has the loss, return that: model(**batch).loss"
    raise ValueError(f"{form} must answer the mean loss, a tensor of one element, and it answered {shown}; {remedy}")
