"""Small jobs with layers in parts: a classifier, and a text with tied weights, dropout and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from split_models import POSITIONS, RULES, SEQUENCE_RULES, VOCABULARY, Transformer

CLASSIFIER_RULES = {"0": "column", "2": "column", "3": "row", "5": "vocabulary"}


def classifier() -> nn.Module:
    """Seven hidden features, which no number of parts divides; five classes."""
    net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5))
    return net.double()


def classes(num_samples: int, seed: int) -> TensorDataset:
    """Points and which of five classes they are of."""
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) * 2).long() % 5)


def job(**changed: Any) -> pt.Job:
    """The job's loss is torch's cross-entropy, its optimizer has momentum, its schedule decays."""
    given: dict[str, Any] = {
        "model": classifier,
        "data": lambda folder: pt.Data(classes(68, 0), classes(16, 1)),
        "loss": nn.functional.cross_entropy,
        "correct": lambda output, target: output.argmax(-1) == target,
        "optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        "schedule": lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * steps),
        "batch_size": 12,
        "epochs": 2,
        "name": "classes",
    }
    return pt.Job(**{**given, **changed})


def text_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss of all positions; a function of whole logits."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def texts(num_samples: int, seed: int) -> TensorDataset:
    """Characters and the next ones."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randint(0, VOCABULARY, (num_samples, POSITIONS + 1), generator=random)
    return TensorDataset(found[:, :-1], found[:, 1:])


def text_job() -> pt.Job:
    """A transformer with all splits together. (Adam would make large steps of the gradients that are but rounding.)"""
    return job(
        model=lambda: Transformer(0.2, blocks=1).double(),
        data=lambda folder: pt.Data(texts(20, 0), texts(6, 1)),
        loss=text_loss,
        correct=lambda output, target: output.argmax(-1) == target,
        batch_size=4,
        name="texts",
    )


def split(parts: int = 2, **options: Any) -> Strategy:
    """The split classifier."""
    return pt.strategies.split(CLASSIFIER_RULES, parts=parts, **options)


def split_text(parts: int = 2, *, sequence: bool = False, **options: Any) -> Strategy:
    """The split transformer."""
    return pt.strategies.split(SEQUENCE_RULES if sequence else RULES, parts=parts, sequence=sequence, **options)


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest distance of a parameter, relative to the largest value of its tensor."""
    assert list(found) == list(expected)
    return max(
        float((found[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-6))
        for name, tensor in expected.items()
    )
