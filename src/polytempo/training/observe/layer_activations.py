"""Layers with weights, by name, and their activations for samples of a job's evaluation data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polytempo.spec.job import Data, Job
from polytempo.spec.objective import judged
from polytempo.training.job.sample_batches import SampleBatches


class Layer(NamedTuple):
    """A module with a weight of two dims or more."""

    name: str
    """The model's own name for it."""
    short: str
    """The kind and number, such as conv1, counted from 1 in the order of the model."""
    module: nn.Module

    @property
    def weight(self) -> Tensor:
        """(outputs, inputs, …)."""
        assert isinstance(self.module.weight, Tensor)
        return self.module.weight.detach()


class LayerActivations(NamedTuple):
    """Activations of a model's layers to the same samples."""

    by_layer: dict[str, Tensor]
    """(samples, …), float32, by the layer's own name; activations of several calls of a layer are in a row."""
    inputs: Tensor | None
    """(samples, …): the batch's input, where it is one tensor."""
    classes: Tensor | None
    """(samples,): the batch's targets, where they are whole numbers."""
    loss: float
    accuracy: float | None


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of `model` with weights, in its own order."""
    counts, found = Counter[str](), []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() >= 2:
            kind = type(module).__name__
            short = "conv" if kind.startswith("Conv") else kind.lower()
            counts[short] += 1
            found.append(Layer(name, f"{short}{counts[short]}", module))
    return found


def named_layer(layers: Sequence[Layer], name: str) -> Layer:
    """The layer with that name, its own before a short one. ValueError that lists the layers."""
    for each in (
        *(layer for layer in layers if layer.name == name),
        *(layer for layer in layers if layer.short == name),
    ):
        return each
    there = ", ".join(f"{each.name or 'the model itself'} ({each.short})" for each in layers)
    raise ValueError(f"there is no layer {name!r} with a weight; there are {there or 'none'}")


def evaluation_samples(data: Data, number: int, seed: int) -> tuple[Any, int, str]:
    """A batch of so many samples of the test set, drawn from the seed; their number, and the set's name.

    Without a test set they are of the training set. ValueError for a set without a length, or with one sample.
    """
    of = "training" if data.test is None else "test"
    samples = SampleBatches(data.train if data.test is None else data.test, data.collate, f"the {of} set")
    if samples.length < 2:
        raise ValueError(f"the {of} set has {samples.length} sample; layers are compared by two at least")
    drawn = torch.randperm(samples.length, generator=torch.Generator().manual_seed(seed))
    chosen = sorted(drawn[:number].tolist())
    return samples.taken(chosen), len(chosen), of


def layer_activations(
    job: Job, model: nn.Module, layers: Sequence[Layer], batch: Any, samples: int
) -> LayerActivations:
    """Activations of these layers of `model` to one batch, dropout off and batch norms by their saved statistics.

    Layers that are not called are left out, and layers without one row for each sample. Memory: all activations.
    """
    model.eval()
    activations: dict[str, list[Tensor]] = {}
    with torch.no_grad(), _kept(layers, samples, activations):
        found = judged(job, model, batch, samples)
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    inputs, target = batch if pair else (None, None)
    return LayerActivations(
        {
            name: parts[0] if len(parts) == 1 else torch.cat([each.flatten(1) for each in parts], 1)
            for name, parts in activations.items()
        },
        inputs if isinstance(inputs, Tensor) else None,
        target if isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point() else None,
        float(found.loss),
        None if found.right is None else float(found.right.double().mean()),
    )


@contextmanager
def _kept(layers: Sequence[Layer], samples: int, activations: dict[str, list[Tensor]]) -> Iterator[None]:
    """Inside, the layers' activations are added to `activations`."""

    def hook(name: str) -> Any:
        def keep(module: nn.Module, given: Any, answer: Any) -> None:
            if isinstance(answer, Tensor) and answer.dim() >= 2 and len(answer) == samples:
                activations.setdefault(name, []).append(answer.detach().float())

        return keep

    with ExitStack() as stack:
        for each in layers:
            stack.enter_context(each.module.register_forward_hook(hook(each.name)))
        yield
