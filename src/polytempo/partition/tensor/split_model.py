"""`SplitModel`: a model with layers divided over the ranks of a group that all get the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from polytempo.core.calls.refusals import refuse
from polytempo.device import own_random_state
from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.exchange import gathered
from polytempo.partition.tensor.layers.cross_entropy import Reduction, split_cross_entropy
from polytempo.partition.tensor.layers.dropout import same_everywhere
from polytempo.partition.tensor.layers.layer import SplitLayer
from polytempo.partition.tensor.layers.linear import VocabularyLinear
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.tensor.parted_model import PartedModel
from polytempo.partition.tensor.spatial.spatial_tensor import whole
from polytempo.partition.tensor.way import Way
from polytempo.partition.wires import AS_THEY_ARE


class LossOptions(TypedDict, total=False):
    """Options of `SplitModel.cross_entropy`, as torch's."""

    ignore_index: int
    label_smoothing: float
    reduction: Reduction


class SplitModel(PartedModel):
    """`model`, split: called as it was.

    Ranks of one model get the same inputs, and must have the same random state wherever the model draws.
    """

    def __init__(self, model: nn.Module, group: ModelGroup, ways: Mapping[str, Way]) -> None:
        super().__init__(model, group)
        self.ways = dict(ways)
        """The way of each split layer."""
        self._checked = group.size == 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's answer. The first time, ranks compare their random states and outputs, with ValueError for a
        difference."""
        if self.group.size > 1 and torch.compiler.is_compiling():
            _refuse_compiling()
        self.group.begin_pass(self.group.drawn(training=self.training))
        check, self._checked = not self._checked, True
        drops = self.training and any(isinstance(m, nn.Dropout) or _drops(m) for m in self.modules())
        if check and (drops or self.group.wires.draws):
            self._check_random()
        answer = tree_map(whole, self.__dict__["model"](*args, **kwargs))
        if check and isinstance(answer, Tensor) and not self._vocabularies():
            self._check_output(answer)
        return answer

    # ------------------------------------------------------------------ logits

    def cross_entropy(self, logits: Tensor, target: Tensor, **options: Unpack[LossOptions]) -> Tensor:
        """The loss of logits of a layer that is split by "vocabulary"; see `split_cross_entropy`."""
        return split_cross_entropy(self.group, logits, target, self._classes(logits), **options)

    def all_logits(self, logits: Tensor) -> Tensor:
        """(…, this rank's classes) to (…, classes), as they are. Cost: a gather."""
        return gathered(self.group, logits, self._classes(logits).sizes, -1, AS_THEY_ARE)

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
        if not same_everywhere(self.group, own_random_state()):
            raise ValueError(
                "the ranks of one model have different random states, so their dropouts and codecs would draw "
                "differently; before training call "
                'torch.manual_seed(seed + world.port.coordinates["data"]) on all of them'
            )

    def _check_output(self, answer: Tensor) -> None:
        if not same_everywhere(self.group, answer):
            raise ValueError(
                "the model's output differs between its ranks, so it is a part; let its last split layer be "
                '"row", pt.partition.tensor.column(gather=True), or "vocabulary" with model.cross_entropy as its loss'
            )


def _refuse_compiling() -> None:
    refuse({"split", "compile"})


# As `torch.compiler.disable`, which would load the compiler (a second) in programs that never compile.
_refuse_compiling._torchdynamo_disable = True  # type: ignore[attr-defined]


def _drops(module: nn.Module) -> bool:
    return isinstance(module, SplitLayer) and bool(getattr(module, "p", 0) or getattr(module, "dropout", 0))


def split_models(model: nn.Module) -> list[SplitModel]:
    """The split models in a module: itself, its parts, or none."""
    return [module for module in model.modules() if isinstance(module, SplitModel)]
