"""Loss and accuracy on a test set: each rank on its part of it, or one rank on all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from polytempo.collectives import tree
from polytempo.core import Port

_BATCH = 512
_FEWEST = 8
"""Samples that are worth a rank's while: many ranks leave a small test set to the first few."""


class Score(NamedTuple):
    """Means over the test set."""

    loss: float
    accuracy: float | None


async def evaluate(
    port: Port,
    model: nn.Module,
    tensors: dict[str, Tensor] | None,
    test: Dataset[Any],
    loss: Callable[[Any, Any], Tensor],
    correct: Callable[[Any, Any], Tensor] | None,
    flops_per_sample: float,
) -> Score:
    """Score `model` on rank r's slice of `test`, and add up. `tensors` stand in for its parameters and buffers."""
    length = len(test)  # type: ignore[arg-type]
    scorers = min(port.size, -(-length // _FEWEST))
    start, stop = (length * min(r, scorers) // scorers for r in (port.rank, port.rank + 1))

    def score() -> Tensor:
        return _score(model, tensors, test, start, stop, loss, correct)

    return _means(await tree(port, await port.compute(score, flops_per_sample * (stop - start))))


def evaluate_alone(
    model: nn.Module,
    test: Dataset[Any],
    loss: Callable[[Any, Any], Tensor],
    correct: Callable[[Any, Any], Tensor] | None,
) -> Score:
    """Score `model` on all of `test`, without the others."""
    return _means(_score(model, None, test, 0, len(test), loss, correct))  # type: ignore[arg-type]


def _means(sums: Tensor) -> Score:
    samples, total_loss, num_correct, num_predictions = sums.tolist()
    accuracy = num_correct / num_predictions if num_predictions else None
    return Score(total_loss / max(samples, 1), accuracy)


@torch.no_grad()
def _score(
    model: nn.Module,
    tensors: dict[str, Tensor] | None,
    test: Dataset[Any],
    start: int,
    stop: int,
    loss: Callable[[Any, Any], Tensor],
    correct: Callable[[Any, Any], Tensor] | None,
) -> Tensor:
    """[samples, summed loss, right predictions, predictions] as float64."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64)
    for inputs, targets in _batches(test, start, stop):
        outputs = model(inputs) if tensors is None else torch.func.functional_call(model, tensors, (inputs,))
        samples = len(targets)
        right = correct(outputs, targets) if correct else None
        counts = (0.0, 0.0) if right is None else (float(right.sum()), float(right.numel()))
        sums += torch.tensor([samples, float(loss(outputs, targets)) * samples, *counts], dtype=torch.float64)
    for module, training in modes:  # one by one: a job may have frozen some
        module.training = training
    return sums


def _batches(test: Dataset[Any], start: int, stop: int) -> Iterator[tuple[Any, Any]]:
    for first in range(start, stop, _BATCH):
        last = min(first + _BATCH, stop)
        if isinstance(test, TensorDataset):
            inputs, targets = (tensor[first:last] for tensor in test.tensors)
        else:
            inputs, targets = default_collate([test[i] for i in range(first, last)])
        yield inputs, targets
