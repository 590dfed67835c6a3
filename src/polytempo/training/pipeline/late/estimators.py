"""`Estimators`: one stage's estimators of the gradients of its outputs: what they predict, and how they learn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from polytempo.core import Port
from polytempo.core.state import Saved, Scalar
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.correction import Estimation
from polytempo.training.checkpoint.optimizer_state import optimizer_restore, optimizer_saved
from polytempo.training.model.randomness import seed_step
from polytempo.training.model.tensor_groups import by_kind
from polytempo.training.pipeline.late.gradient_estimator import GradientEstimator

_CHANNEL = 890
_PATH = "estimators"


class _Estimated(NamedTuple):
    """What an estimator has been given for a batch."""

    outputs: dict[str, Tensor]
    labels: Tensor | None


class Estimators:
    """Estimator M of each tensor that this stage gives to others; made when the first tensor is seen.

        δ̂ = M(h, labels) / n                       n samples; h and δ̂: (n, …)
        learning:  (1/n) Σ ‖M(h, labels) - n δ‖²   δ is what the stages behind send, and is not descended through

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
        """Of each estimator: its tensor's name, the shape of one sample of it, and the dtype."""

    def see(self, number: int, outputs: dict[str, Tensor], target: Any) -> None:
        """Batch `number` has passed: what this stage has given of it. ValueError for a target that is no label."""
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
        """Step by what `descend` has left; with the mean over replicas."""
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
        """The estimators, their optimizers, and the batches whose gradients have not come yet."""
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
        """Go on as those that `source` is the state of."""
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
        with torch.random.fork_rng(devices=[]):
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
