"""`TorchState`: a model, an optimizer, samplers, and values beside them."""

from __future__ import annotations

import copy
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.horovod.torch.elastic.sampler import ElasticSampler
from polytempo.horovod.torch.elastic.state import ObjectState
from polytempo.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from polytempo.horovod.torch.gradient_reduction import GradientReduction
from polytempo.training.checkpoint.optimizer_state import load_exactly


class TorchState(ObjectState):
    """`TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)`; `state.epoch` is a value.

    Modules, optimizers, `ElasticSampler`s, and other objects with `state_dict` and `load_state_dict` (schedules, a
    `GradScaler`), are saved, restored and synchronized as such, by any name; the others are values, as in
    `ObjectState`. A commit costs a copy of model and optimizer state, and of the codecs' residuals. Residuals are each
    rank's own: a newcomer has none.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._parts: dict[str, _Part] = {}
        for name, value in given.items():
            part = next((part for kind, part in _PARTS if isinstance(value, kind)), None)
            if part is not None:
                self._parts[name] = part(value)
        super().__init__(**{name: value for name, value in kwargs.items() if name not in self._parts})
        for name in given.keys() - self._names:
            setattr(self, name, given[name])

    def __setattr__(self, name: str, value: Any) -> None:
        """Another model, optimizer or sampler takes the place of the one of this name."""
        super().__setattr__(name, value)
        if name in self.__dict__.get("_parts", ()):
            self._parts[name].value = value

    def save(self) -> None:
        """Keep a copy in memory."""
        for part in self._parts.values():
            part.save()
        super().save()

    def restore(self) -> None:
        """Go back to the copy."""
        for part in self._parts.values():
            part.restore()
        super().restore()

    def sync(self) -> None:
        """All processes get rank 0's model, optimizer state, samplers and values, and keep a copy."""
        for part in self._parts.values():
            part.sync()
        super().sync()

    def reset(self) -> None:
        """Deal the rest of the epoch to the new group."""
        for sampler in self._samplers():
            sampler.reset()

    def _samplers(self) -> list[ElasticSampler]:
        return [part.value for part in self._parts.values() if isinstance(part, _SamplerPart)]

    def _has_news(self) -> bool:
        return any(sampler.recorded_alone for sampler in self._samplers())

    def _share_news(self) -> None:
        for sampler in self._samplers():
            lists = allgather_object(sorted(sampler.recorded_alone), "elastic.recorded")
            sampler.recorded_by_all([index for each in lists for index in each])


class _Part(Protocol):
    value: Any

    def __init__(self, value: Any) -> None: ...

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None: ...


class _ModelPart:
    def __init__(self, value: nn.Module) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = {
            name: each.detach().clone() if isinstance(each, Tensor) else copy.deepcopy(each)
            for name, each in self.value.state_dict().items()
        }

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class _OptimizerPart:
    def __init__(self, value: Optimizer) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())
        self._unsent = None if self._reduction is None else self._reduction.kept()

    def restore(self) -> None:
        load_exactly(self.value, copy.deepcopy(self._saved))
        if self._reduction is not None and self._unsent is not None:
            self._reduction.go_to(self._unsent)

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        if self._reduction is not None:
            self._reduction.count_from(broadcast_object(self._reduction.steps, 0, "elastic.exchanges"))

    @property
    def _reduction(self) -> GradientReduction | None:
        """The reduction of a distributed optimizer."""
        return getattr(self.value, "_reduction", None)


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class _StatefulPart:
    def __init__(self, value: _Stateful) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0, "elastic.part"))


class _SamplerPart:
    def __init__(self, value: ElasticSampler) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = self.value.position()

    def restore(self) -> None:
        self.value.go_to(self._saved)

    def sync(self) -> None:
        """Take rank 0's state: all ranks share a commit, and its count of processed samples."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0, "elastic.sampler"))


_PARTS: tuple[tuple[type[Any], type[_Part]], ...] = (
    (nn.Module, _ModelPart),
    (Optimizer, _OptimizerPart),
    (ElasticSampler, _SamplerPart),
    (_Stateful, _StatefulPart),
)
