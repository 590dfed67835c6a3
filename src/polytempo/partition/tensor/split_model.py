"""`SplitModel`: a model of which this rank has its part of each split layer, and ways to see the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from polytempo.partition.tensor.cross_entropy import Reduction, split_cross_entropy
from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.dropout import same_everywhere
from polytempo.partition.tensor.exchange import gathered
from polytempo.partition.tensor.layer import SplitLayer
from polytempo.partition.tensor.linear import VocabularyLinear
from polytempo.partition.tensor.model_group import ModelGroup


class LossOptions(TypedDict, total=False):
    """Of `SplitModel.cross_entropy`, as of torch's."""

    ignore_index: int
    label_smoothing: float
    reduction: Reduction


class SplitModel(nn.Module):
    """`model`, split: called as it was, its parameters under the same names, each this rank's part or the whole.

    Ranks of one model are given the same inputs, and must have the same random state wherever the model draws.
    """

    def __init__(self, model: nn.Module, group: ModelGroup) -> None:
        super().__init__()
        # one set of parameters and modules, under the model's own names; the model itself is no submodule
        for each in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[each] = model.__dict__[each]
        self.__dict__["model"], self.group = model, group
        self.training = model.training
        self._checked = group.size == 1

    def __getattr__(self, name: str) -> Any:
        """What the model has besides."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model" not in self.__dict__:
                raise
            return getattr(self.__dict__["model"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's. The first time, ranks compare their random states and outputs; ValueError says what is amiss."""
        check, self._checked = not self._checked, True
        if check and self.training and any(isinstance(m, nn.Dropout) or _drops(m) for m in self.modules()):
            self._check_random()
        answer = self.__dict__["model"](*args, **kwargs)
        if check and isinstance(answer, Tensor) and not self._vocabularies():
            self._check_output(answer)
        return answer

    def train(self, mode: bool = True) -> SplitModel:
        """As of any module."""
        self.__dict__["model"].training = mode
        super().train(mode)
        return self

    # ------------------------------------------------------------------ the whole

    @property
    def parts(self) -> dict[str, Division]:
        """How each split parameter is cut, by its name. Of all others every rank has the whole."""
        found: dict[str, Division] = {}
        for prefix, module in self.named_modules(remove_duplicate=False):
            if isinstance(module, SplitLayer):
                held = [name for name in module.parts if module._parameters.get(name) is not None]
                found |= {f"{prefix}.{name}" if prefix else name: module.parts[name] for name in held}
        return found

    def replicated(self) -> list[nn.Parameter]:
        """Parameters that every rank of the model has as a whole."""
        parts = self.parts
        return [parameter for name, parameter in self.named_parameters() if name not in parts]

    def full_parameters(self) -> dict[str, Tensor]:
        """The whole model's parameters by its names, on every rank. All ranks of the model call it.

        Cost: a gather of every split parameter.
        """
        return self._full(lambda parameter: parameter.detach())

    def full_gradients(self) -> dict[str, Tensor]:
        """The same of gradients; parameters without one are left out."""
        return self._full(lambda parameter: parameter.grad)

    def _full(self, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        parts = self.parts
        found: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            tensor = of(parameter)
            if tensor is not None:
                found[name] = self._joined(tensor, parts[name]) if name in parts else tensor.clone()
        return found

    def _joined(self, part: Tensor, how: Division) -> Tensor:
        sizes = [how.packed * size for size in how.sizes]
        return how.join(self.group.gather(part, sizes, how.dim).split(sizes, how.dim))

    @torch.no_grad()
    def load_full_parameters(self, full: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of a whole model's parameters. ValueError names those that are missing."""
        parts, own = self.parts, dict(self.named_parameters())
        if missing := sorted(own.keys() - full.keys()):
            raise ValueError(f"the whole model's parameters lack {', '.join(missing[:5])}; there are {len(full)}")
        for name, parameter in own.items():
            whole = full[name]
            parameter.copy_(parts[name].take(whole, self.group.rank) if name in parts else whole)

    # ------------------------------------------------------------------ logits

    def cross_entropy(self, logits: Tensor, target: Tensor, **options: Unpack[LossOptions]) -> Tensor:
        """The loss of logits of a layer that is split by "vocabulary"; see `split_cross_entropy`."""
        return split_cross_entropy(self.group, logits, target, self._classes(logits), **options)

    def all_logits(self, logits: Tensor) -> Tensor:
        """(…, this rank's classes) to (…, classes). Cost: a gather."""
        return gathered(self.group, logits, self._classes(logits).sizes, -1)

    def _vocabularies(self) -> list[VocabularyLinear]:
        return [module for module in self.modules() if isinstance(module, VocabularyLinear)]

    def _classes(self, logits: Tensor) -> Division:
        layers = self._vocabularies()
        for layer in layers:
            if layer.outputs.sizes[self.group.rank] == logits.shape[-1]:
                return layer.outputs
        own = [layer.outputs.sizes[self.group.rank] for layer in layers]
        raise ValueError(
            f'logits have {logits.shape[-1]} classes; rank {self.group.rank} has {own} in layers split by "vocabulary"'
        )

    # ------------------------------------------------------------------ checks

    def _check_random(self) -> None:
        if not same_everywhere(self.group, torch.get_rng_state()):
            raise ValueError(
                "the ranks of one model have different random states, so their dropouts would differ; before training "
                'call torch.manual_seed(seed + world.port.coordinates["data"]) on all of them'
            )

    def _check_output(self, answer: Tensor) -> None:
        if not same_everywhere(self.group, answer):
            raise ValueError(
                "the model's output differs between its ranks, so it is a part; let its last split layer be "
                '"row", pt.partition.tensor.column(gather=True), or "vocabulary" with model.cross_entropy as its loss'
            )


def _drops(module: nn.Module) -> bool:
    return isinstance(module, SplitLayer) and bool(getattr(module, "p", 0) or getattr(module, "dropout", 0))


def split_models(model: nn.Module) -> list[SplitModel]:
    """The split models in a module: itself, its parts, or none."""
    return [module for module in model.modules() if isinstance(module, SplitModel)]
