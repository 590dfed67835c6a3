"""`Estimators`: one stage's estimators of the gradients of its outputs, networks such as `GradientEstimator`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from polytempo.core import Port
from polytempo.core.bundle import by_kind
from polytempo.core.state import Saved, Scalar
from polytempo.device import kept_random_states
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.correction import Estimation
from polytempo.training.checkpoint.optimizer_state import optimizer_restore, optimizer_saved
from polytempo.training.model.randomness import seed_step

_CHANNEL = 890
_PATH = "estimators"


class _Estimated(NamedTuple):
    outputs: dict[str, Tensor]
    labels: Tensor | None


class Estimators:
    """Estimator M of each tensor that this stage gives to others; made when the first tensor is seen.

        δ̂ = M(h, labels) / n                       n samples; h and δ̂: (n, …)
        learning:  (1/n) Σ ‖M(h, labels) - n δ‖²   δ comes from the stages behind, and is not descended through

    `data` is the port of this stage's replicas: they learn by the mean of their gradients, and stay equal.
    """

    def __init__(
        self, estimation: Estimation, seed: int = 0, data: Port | None = None, device: torch.device | None = None
    ) -> None:
        self._estimation, self._seed, self._data, self._device = estimation, seed, data, device
        self.modules = nn.ModuleDict()
        self._optimizers: dict[str, Optimizer] = {}
        self._seen: dict[int, _Estimated] = {}
        self._made: list[tuple[str, tuple[int, ...], str]] = []
        """Each estimator's tensor name, shape of one sample, and dtype."""

    def see(self, number: int, outputs: dict[str, Tensor], target: Any) -> None:
        """Batch `number` has passed with these outputs of this stage. ValueError for a target that is not a label."""
        labels = _one_hot(target, self._estimation.classes, outputs) if self._estimation.classes else None
        self._seen[number] = _Estimated(outputs, labels)
        for name, output in outputs.items():
            if _key(name) not in self.modules:
                self._make(name, output)

    def estimates(self, number: int, names: Sequence[str]) -> list[Tensor | None]:
        """The gradients that batch `number` goes back with; None for a tensor that nothing comes back for."""
        outputs, labels = self._seen[number]
        with torch.no_grad():
            return [self._predicted(n, outputs[n], labels) / len(outputs[n]) if n in outputs else None for n in names]

    def descend(self, number: int, gradients: dict[str, Tensor]) -> None:
        """Leave in `.grad` how far batch `number`'s estimates are from `gradients`, and forget the batch."""
        outputs, labels = self._seen.pop(number)
        for name, gradient in gradients.items():
            samples = len(gradient)
            with torch.enable_grad():
                error = self._predicted(name, outputs[name], labels) - samples * gradient
                (error.square().sum() / samples).backward()

    async def learn(self) -> None:
        """Step by the gradients of `descend`; by their mean over replicas."""
        gradients = {n: p.grad for n, p in self.modules.named_parameters() if p.grad is not None}
        if self._data is not None and self._data.size > 1:
            port = self._data.on_channel(_CHANNEL)
            for group in by_kind(gradients).values():
                flat = await port.all_reduce(torch.cat([gradient.flatten() for gradient in group.values()]))
                means = (flat / port.size).split([gradient.numel() for gradient in group.values()])
                for gradient, mean in zip(group.values(), means, strict=True):
                    gradient.copy_(mean.view_as(gradient))
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    def flops(self, number: int) -> float:
        """Operations of one prediction for every output of batch `number`, by dense layers at each of its places."""
        total = 0.0
        for name, h in self._seen[number].outputs.items():
            places = h.numel() / (h.shape[1] if h.dim() == 4 else h.shape[-1])
            total += 2.0 * places * sum(p.numel() for p in self.modules[_key(name)].parameters() if p.dim() > 1)
        return total

    def state(self) -> Saved:
        """The estimators, their optimizers, and the batches that still wait for their gradients."""
        tensors: dict[str, Tensor] = {}
        scalars: dict[str, Scalar] = {_PATH: json.dumps({"made": self._made, "seen": list(self._seen)})}
        for place, key in enumerate(self.modules):
            tensors |= {f"module/{place}/{name}": t for name, t in self.modules[key].state_dict().items()}
            own = optimizer_saved(self._optimizers[key], f"optimizer/{place}")
            tensors, scalars = tensors | own.tensors, scalars | own.scalars
        for number, (outputs, labels) in self._seen.items():
            tensors |= {f"seen/{number}/{name}": output for name, output in outputs.items()}
            tensors |= {} if labels is None else {f"labels/{number}": labels}
        return Saved(tensors, scalars)

    def restore(self, source: Saved) -> None:
        """Go on from the state `source`."""
        plain = json.loads(str(source.scalars[_PATH]))
        for place, (name, shape, dtype) in enumerate(plain["made"]):
            self._make(name, torch.empty((0, *shape), dtype=getattr(torch, dtype), device=self._device))
            self.modules[_key(name)].load_state_dict(source.under(f"module/{place}").tensors)
            optimizer_restore(self._optimizers[_key(name)], source, f"optimizer/{place}")
        for number in plain["seen"]:
            outputs = source.under(f"seen/{number}").tensors
            self._seen[number] = _Estimated(outputs, source.tensors.get(f"labels/{number}"))

    def _predicted(self, name: str, h: Tensor, labels: Tensor | None) -> Tensor:
        module = self.modules[_key(name)]
        answer: Tensor = module(h) if labels is None else module(h, labels)
        if answer.shape != h.shape:
            raise ValueError(
                f"an estimator answers with a gradient of its input's shape {tuple(h.shape)}; that of {name} has "
                f"answered {tuple(answer.shape)}"
            )
        return answer

    def _make(self, name: str, output: Tensor) -> None:
        own, key = self._estimation, _key(name)
        with kept_random_states():
            seed_step(self._seed, 0, 0, f"estimator of {name}")
            shape = tuple(output.shape[1:])
            if own.make is None:
                module: nn.Module = GradientEstimator(shape, own.classes, own.hidden_layers, own.width)
            else:
                module = own.make(shape, own.classes)
        module = module.to(output.device, output.dtype)
        self.modules[key] = module
        self._optimizers[key] = (own.optimizer or self._adam)(module.parameters())
        self._made.append((name, shape, str(output.dtype).removeprefix("torch.")))

    def _adam(self, parameters: Any) -> Optimizer:
        return Adam(parameters, lr=self._estimation.lr)


def estimators_of(
    schedule: Schedule, stage: int, seed: int = 0, data: Port | None = None, device: torch.device | None = None
) -> Estimators | None:
    """The estimators of a stage; None where it waits for its gradients, or has the loss."""
    if schedule.estimation is None or stage == schedule.stages - 1:
        return None
    return Estimators(schedule.estimation, seed, data, device)


def _key(name: str) -> str:
    """A name that `nn.ModuleDict` takes."""
    return name.replace(".", "/")


def _one_hot(target: Any, classes: int, outputs: dict[str, Tensor]) -> Tensor:
    """(samples, classes), in the dtype of the outputs."""
    output = next(iter(outputs.values()), torch.empty(0))
    if not isinstance(target, Tensor) or target.dim() != 1 or target.is_floating_point():
        found = f"{tuple(target.shape)} {target.dtype}" if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"classes={classes} gives estimators the labels, which are one integer a sample; got {found}")
    if len(target) and not 0 <= int(target.min()) <= int(target.max()) < classes:
        raise ValueError(f"a label is {int(target.max())}, and the estimators know classes={classes}; give more")
    return nn.functional.one_hot(target.long(), classes).to(output.device, output.dtype)


class GradientEstimator(nn.Module):
    """Layers over the features of every sample: the last dimension, or the channels of maps. The last one is zero.

    `shape` is one sample's: (features,), (places, features) or (channels, height, width). Labels are further features,
    the same at every place. ValueError for other shapes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int = 0, hidden_layers: int = 0, width: int = 256) -> None:
        super().__init__()
        if len(shape) not in (1, 2, 3):
            raise ValueError(
                f"no estimator is known for outputs of shape {shape}; a stage ends with one of one, two or three "
                "dimensions beside that of samples, or give estimator="
            )
        self.is_map = len(shape) == 3
        features = shape[0] if self.is_map else shape[-1]
        sizes = [features + classes, *[width] * hidden_layers, features]
        layers = [_layer(before, after, self.is_map) for before, after in pairwise(sizes)]
        for parameter in layers[-1].parameters():
            nn.init.zeros_(parameter)
        joined = [module for layer in layers for module in (layer, nn.ReLU())][:-1]
        self.body = nn.Sequential(*joined)

    def forward(self, h: Tensor, labels: Tensor | None = None) -> Tensor:
        """h: (samples, *shape); labels: (samples, classes); the answer: (samples, *shape)."""
        if labels is not None:
            dim = 1 if self.is_map else -1
            shape = list(h.shape)
            shape[dim] = labels.shape[-1]
            inserted = [1] * (h.dim() - 2)
            wide = labels.reshape(len(labels), *([-1, *inserted] if self.is_map else [*inserted, labels.shape[-1]]))
            h = torch.cat([h, wide.expand(shape)], dim=dim)
        answer: Tensor = self.body(h)
        return answer


def _layer(before: int, after: int, is_map: bool) -> nn.Module:
    return nn.Conv2d(before, after, 3, padding=1) if is_map else nn.Linear(before, after)
