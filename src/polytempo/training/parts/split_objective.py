"""The loss of a job whose model is split: of the whole answer, also where the output layer's classes are divided."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from polytempo.partition.tensor.layers.linear import VocabularyLinear
from polytempo.partition.tensor.split_model import SplitModel
from polytempo.spec.job import Job, OfBatch
from polytempo.spec.objective import loss_of, loss_of_pair, output_of, pair_of


def loss_of_split(job: Job, model: SplitModel, batch: Any) -> Tensor:
    """As `loss_of`. Logits of classes that are divided are gathered, but for torch's cross-entropy of class indices.

    Errors: those of `loss_of`; ValueError where the job's loss would see divided logits, or cannot be given whole ones.
    """
    if not any(isinstance(module, VocabularyLinear) for module in model.modules()):
        return loss_of(job, model, batch)
    if isinstance(job.loss, OfBatch):
        raise ValueError(
            f"job {job.name}: its loss calls the model itself, and would get divided logits of a layer split by "
            '"vocabulary"; let the job have loss(output, target), or split that layer by column(gather=True)'
        )
    inputs, target = pair_of(job, batch)
    output = output_of(job, model, inputs)
    if not isinstance(output, Tensor):
        raise ValueError(
            f'job {job.name}: a layer is split by "vocabulary", so the model answers a tensor of logits, and this is '
            f"a {type(output).__name__}; split that layer by column(gather=True)"
        )
    of_indices = isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == 1
    if job.loss is functional.cross_entropy and output.dim() == 2 and of_indices:
        return model.cross_entropy(output, target)
    return loss_of_pair(job, model.all_logits(output), target)
