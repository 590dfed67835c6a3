"""A job's objective on one batch: the loss to descend, and the right predictions.

loss(output, target)          a batch is a pair (input, target), and output = model(input)
of_batch(loss)(model, batch)  a batch is any value that the loss understands
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from polytempo.spec.batch_weight import checked_weight
from polytempo.spec.job import Job, OfBatch
from polytempo.spec.job_calls import called, described, who, wrong
from polytempo.spec.loss_divisor import DividedLoss, Divisor, divisor_of, in_sum, weights

_LOSS, _LOSS_OF_BATCH, _WEIGHT = "loss(output, target)", "loss(model, batch)", "weight(batch)"
_CORRECT, _CORRECT_OF_BATCH = "correct(output, target)", "correct(model, batch)"


class Judged(NamedTuple):
    """A job's judgement of a model's answers to one batch."""

    loss: Tensor
    """The mean over the batch."""
    right: Tensor | None
    """The answer of the job's `correct`; None if it has none."""
    seen: tuple[Any, Any] | None = None
    """The predictions and targets that the job's `metrics` see; None if it has none."""


def loss_of(job: Job, model: nn.Module, batch: Any) -> Tensor:
    """The mean loss of `model` on `batch`, with a gradient where one is wanted.

    Errors: ValueError for a batch or a loss that the job's form cannot be; JobFailed where model or loss raises.
    """
    if isinstance(job.loss, OfBatch):
        return _loss_of_batch(job, job.loss, model, batch)
    inputs, target = pair_of(job, batch)
    return loss_of_pair(job, output_of(job, model, inputs), target)


def judged(job: Job, model: nn.Module, batch: Any, samples: int) -> Judged:
    """Loss and right predictions of `model` on `batch`: one forward pass for both where the batch is a pair.

    `samples`: of the batch. Errors: the errors of `loss_of`, and ValueError for a `correct` that answers a sum, a
    mean, or each prediction beside each target.
    """
    loss, correct = job.loss, job.correct
    output = target = None
    if not all(isinstance(part, OfBatch) for part in (loss, correct, _pairing(job)) if part is not None):
        inputs, target = pair_of(job, batch)
        output = output_of(job, model, inputs)
    if isinstance(loss, OfBatch):  # noqa: SIM108  # one line would be longer than a line may be
        value = _loss_of_batch(job, loss, model, batch)
    else:
        value = loss_of_pair(job, output, target)
    seen = _seen(job, model, batch, output, target)
    if correct is None:
        return Judged(value, None, seen)
    if isinstance(correct, OfBatch):
        right = called(job, _CORRECT_OF_BATCH, correct.function, model, batch, facts=lambda: _facts(batch=batch))
    else:
        right = called(job, _CORRECT, correct, output, target, facts=lambda: _facts(output=output, target=target))
    if returned := _no_predictions(right, target, samples):
        form = _CORRECT_OF_BATCH if isinstance(correct, OfBatch) else _CORRECT
        expected = "a tensor with a boolean, or a number from 0 to 1, for each prediction"
        raise wrong(job, form, returned, expected, getattr(correct, "function", correct))
    return Judged(value, right, seen)


def _pairing(job: Job) -> Any:
    """The function that makes the predictions and targets of the job's metrics; None if there are no metrics."""
    return (job.predictions or _as_they_are) if job.metrics else None


def _seen(job: Job, model: nn.Module, batch: Any, output: Any, target: Any) -> tuple[Any, Any] | None:
    pairing = _pairing(job)
    if pairing is None:
        return None
    if isinstance(pairing, OfBatch):
        form, facts = "predictions(model, batch)", partial(_facts, batch=batch)
        seen = called(job, form, pairing.function, model, batch, facts=facts)
    else:
        form, facts = "predictions(output, target)", partial(_facts, output=output, target=target)
        seen = called(job, form, pairing, output, target, facts=facts)
    if not isinstance(seen, tuple) or len(seen) != 2:
        expected = "a pair (predictions, targets), as a tuple"
        raise wrong(job, form, seen, expected, getattr(pairing, "function", pairing))
    return seen


def _as_they_are(output: Any, target: Any) -> tuple[Any, Any]:
    return output, target


def _no_predictions(right: Any, target: Any, samples: int) -> str:
    """A description of `right` if it does not say of each prediction how right it is; else nothing."""
    if not isinstance(right, Tensor) or right.is_complex():
        return described(right)
    said = f"{described(right)} for {samples} samples"
    if samples > 1 and right.dim() == 0:
        return f"{said}, a sum or a mean"
    if samples > 1 and isinstance(target, Tensor) and target.dim() == 1 and right.shape == (samples, samples):
        return f"{said}, each output beside each target: a dim of 1 in the output that the target lacks, or the reverse"
    if right.dtype == torch.bool or bool(((right >= 0) & (right <= 1)).all()):
        return ""
    return f"{said}, with numbers from {float(right.min()):g} to {float(right.max()):g}"


def output_of(job: Job, model: nn.Module, inputs: Any) -> Any:
    """The model's answer. Errors: JobFailed if it raises."""
    return called(job, "model(input)", model, inputs, facts=lambda: _facts(input=inputs))


def _loss_of_batch(job: Job, loss: OfBatch, model: nn.Module, batch: Any) -> Tensor:
    value = called(job, _LOSS_OF_BATCH, loss.function, model, batch, facts=lambda: _facts(batch=batch))
    return _checked(job, value, _LOSS_OF_BATCH, loss.function)


def loss_of_pair(job: Job, output: Any, target: Any) -> Tensor:
    """The mean loss of a model's `output`, as `loss_of` has it."""
    value = called(job, _LOSS, job.loss, output, target, facts=lambda: _facts(output=output, target=target))
    return _checked(job, value, _LOSS, job.loss)


def pair_loss(job: Job) -> DividedLoss:
    """`loss_of_pair` of that job, with its divisor."""
    divisor = divisor_of(job.loss) if job.weight is None else Divisor(partial(batch_weight, job), of_batch=True)
    return DividedLoss(partial(loss_of_pair, job), divisor)


def batch_weight(job: Job, batch: Any) -> float:
    """The batch's weight by the job's `weight`."""
    assert job.weight is not None
    given = called(job, _WEIGHT, job.weight, batch, facts=lambda: _facts(batch=batch))
    try:
        return checked_weight(given)
    except ValueError as error:
        raise ValueError(f"{who(job)}: {error}") from None


def part_weights(job: Job, batches: Sequence[Any]) -> list[float] | None:
    """Weights of the losses of a batch's parts in its loss; None: their numbers of samples."""
    if job.weight is not None:
        return in_sum([batch_weight(job, batch) for batch in batches])
    if (divisor := divisor_of(job.loss)) is None:
        return None
    whole = isinstance(job.loss, OfBatch)
    return weights(divisor, [batch if whole else pair_of(job, batch)[1] for batch in batches])


def part_weight(job: Job, batch: Any, samples: int) -> float:
    """Divisor of a batch's loss: its weight in the mean over several batches; for a sum, the number of samples."""
    if job.weight is not None:
        return batch_weight(job, batch)
    divisor = divisor_of(job.loss)
    if divisor is None or divisor.function is None:
        return samples
    return float(divisor.function(batch if isinstance(job.loss, OfBatch) else pair_of(job, batch)[1]))


def _facts(**values: Any) -> str:
    return ", ".join(f"{name} is {described(value)}" for name, value in values.items())


def pair_of(job: Job, batch: Any) -> Sequence[Any]:
    """The batch as (input, target), which `loss(output, target)` needs. Raises ValueError for anything else."""
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
        return batch
    raise ValueError(
        f"{who(job)}: loss(output, target) needs batches that are pairs (input, target), but this one is "
        f"{described(batch)}; let the job have loss=pt.of_batch(lambda model, batch: ...), which is called with the "
        "whole batch, or give its data a collate function that makes pairs"
    )


def _checked(job: Job, loss: Any, form: str, function: object) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if torch.is_grad_enabled() and not loss.requires_grad and not is_batchedtensor(loss):  # vmap hides it
            expected = "a loss that depends on the model's parameters: leave out .item(), .detach() and torch.no_grad()"
            raise wrong(job, form, "a tensor without a gradient", expected, function)
        return loss
    remedy = "take its mean" if isinstance(loss, Tensor) else "if it has the loss, return that: model(**batch).loss"
    shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else loss
    raise wrong(job, form, shown, f"the mean loss, a tensor of one element; {remedy}", function)
