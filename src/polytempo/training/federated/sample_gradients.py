"""`SampleGradients`: gradients of single samples, clipped, added, and with noise (`dp_sgd`).

batch (x₁, …, x_b) ──vmap──▶ g₁, …, g_b ──▶ (Σᵢ gᵢ min(1, S / ‖gᵢ‖) + noise) / b ──▶ `.grad`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from polytempo.core.strategy import SamplePrivacy
from polytempo.federated.privacy import gaussian_like
from polytempo.spec.job import Job
from polytempo.spec.job_calls import described
from polytempo.spec.loss_divisor import check_by_samples
from polytempo.spec.objective import loss_of
from polytempo.training.model.requirements import check_each_sample

_MOST_BYTES = 256 << 20


class ModelLoss(nn.Module):
    """A job's loss as a module, for parameters that are given."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__()
        self.model, self._job = model, job
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.places = {
            f"model.{path}.{key}".replace("..", "."): names[id(parameter)]
            for path, module in model.named_modules()
            for key, parameter in module.named_parameters(recurse=False)
        }
        """Each parameter's places, and its name: a tied one has several places, a shared module one."""

    def forward(self, batch: Any) -> Tensor:
        """The mean loss of a batch."""
        return loss_of(self._job, self.model, batch)

    def at(self, parameters: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The mean loss of a batch with these parameters, and the model's own for the names left out."""
        named = {place: parameters[name] for place, name in self.places.items() if name in parameters}
        found: Tensor = functional_call(self, named, (batch,), tie_weights=False)
        return found.reshape(())


class SampleGradients:
    """The private gradients of a model. It leaves them in `.grad` of all parameters that require one."""

    def __init__(self, job: Job, model: nn.Module, privacy: SamplePrivacy, who: str) -> None:
        """`who`: the strategy. `Incompatible` (PT2522) for a model that normalises over samples; ValueError for a loss
        that is not a mean over samples."""
        check_each_sample(model, who)
        check_by_samples(job.loss, who)
        self._job, self._privacy, self._loss = job, privacy, ModelLoss(job, model)
        self._parameters = dict(model.named_parameters())

    def compute(self, batch: Any, source: np.random.Generator | None, part: float = 1.0) -> Tensor:
        """The mean loss of a batch, with (Σᵢ gᵢ min(1, S / ‖gᵢ‖) + N(0, part z² S²)) / b in `.grad`.

        `source` draws the noise (`federated.privacy.noise_source`), None: there is none. Cost: a forward and a backward
        pass for each sample, together. Memory: a gradient for each sample of a chunk, of 256 MiB at most or one sample.
        """
        leaves, structure = tree_flatten(batch)
        samples = self._samples_of(leaves)
        trained = {name: each for name, each in self._parameters.items() if each.requires_grad}
        num_bytes = sum(each.numel() * each.element_size() for each in trained.values())
        chunk = max(1, _MOST_BYTES // max(1, num_bytes))
        total = {name: torch.zeros_like(each) for name, each in trained.items()}
        losses = []
        for begin in range(0, samples, chunk):
            piece = [leaf[begin : begin + chunk] for leaf in leaves]
            gradients, loss = self._pass(trained, piece, structure)
            losses.append(loss)
            for name, each in clipped_sums(gradients, self._privacy.clip).items():
                total[name] += each
        self._add_noise_(total, source, part)
        for name, parameter in trained.items():
            parameter.grad = total[name].div_(samples)
        return torch.cat(losses).mean()

    def _samples_of(self, leaves: list[Any]) -> int:
        sizes = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves}
        if len(sizes) != 1 or None in sizes:
            shown = ", ".join(map(described, leaves))
            raise ValueError(
                f"job {self._job.name}: gradients of single samples need batches of tensors with the samples in their "
                f"first dimension, and this one has {shown}; let the collate function make such tensors"
            )
        [samples] = sizes
        assert samples is not None
        return samples

    def _pass(
        self, trained: Mapping[str, nn.Parameter], piece: list[Tensor], structure: Any
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients by name, and losses, of each sample; theirs is the first dimension."""

        def loss(parameters: Mapping[str, Tensor], sample: list[Tensor]) -> Tensor:
            return self._loss.at(parameters, tree_unflatten([leaf.unsqueeze(0) for leaf in sample], structure))

        detached = {name: parameter.detach() for name, parameter in trained.items()}
        try:
            gradients, losses = vmap(grad_and_value(loss), in_dims=(None, 0), randomness="different")(detached, piece)
        except Exception as error:
            raise ValueError(
                f"job {self._job.name}: gradients of single samples (torch.func.vmap) cannot be had of its model or "
                f"loss: {str(error).strip().partition(chr(10))[0]}; use layers and losses that torch.func takes"
            ) from error
        return gradients, losses

    def _add_noise_(self, total: Mapping[str, Tensor], source: np.random.Generator | None, part: float) -> None:
        scale = self._privacy.noise * self._privacy.clip * part**0.5 if self._privacy.noise else 0.0
        if source is None or not scale:
            return
        for each in total.values():
            each.add_(gaussian_like(each, source), alpha=scale)


def clipped_sums(gradients: Mapping[str, Tensor], clip: float) -> dict[str, Tensor]:
    """Σᵢ gᵢ min(1, S / ‖gᵢ‖) by name, of gradients of shape (samples, …); a norm is over all names."""
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
    factors = (clip / norms).clamp(max=1.0)
    return {name: torch.tensordot(factors.to(each.dtype), each, dims=1) for name, each in gradients.items()}
