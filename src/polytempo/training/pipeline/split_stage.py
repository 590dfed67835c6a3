"""Stages with split layers: each stage of a replica is on several ranks, which compute it together.

             stage 0          stage 1            along "stage": activations and their gradients, as in every pipeline
model 0      rank 0 ────────▶ rank 2             along "model": split layers' exchanges
               ▲ │              ▲ │
             model            model              a tensor across a cut is whole on all ranks of a stage, and each
               │ ▼              │ ▼              sends it to the rank with the same coordinate
model 1      rank 1 ────────▶ rank 3
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polytempo.core import Port
from polytempo.core.suspension import drive
from polytempo.partition.cut import Cut
from polytempo.partition.tensor import ModelGroup, apply_rules
from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.layers.dropout import same_everywhere
from polytempo.partition.tensor.rules import matched
from polytempo.partition.tensor.split_model import SplitModel, split_models
from polytempo.partition.tensor.way import SplitLayers, Way


def split_stage(model: nn.Module, cut: Cut, split: SplitLayers, stage: int, stages: int, holders: Port) -> Cut:
    """The cut with split layers in the parts of `stage`, in modules of their own; other parts are whole.

    `holders`: the ranks that hold the stage together.

    Errors: ValueError for rules that do not fit the model, for "auto", and for tied weights that are not split alike.
    """
    if isinstance(split.rules, str):
        raise ValueError('"auto" chooses ways for a whole model, and here it is cut into stages; give rules by name')
    ways = matched(model, split.rules)
    if divided := next((name for name, way in ways.items() if way.kind == "vocabulary"), None):
        raise ValueError(
            f'{divided} is split by "vocabulary", and the loss of a pipeline gets whole logits; give it '
            "column(gather=True)"
        )
    _check_shared(cut, ways, stages)
    group = ModelGroup(holders, drive, split.sequence, split.wires)
    found = list(cut.stages)
    for part in cut.stages[stage::stages]:
        module = deepcopy(part.module)
        names = {name for name, _ in module.named_modules()}
        rules = {name: way for name, way in ways.items() if name in names}
        found[part.index] = replace(part, module=_checked(apply_rules(module, rules, group), part.index))
    return replace(cut, stages=tuple(found))


def _checked(model: SplitModel, part: int) -> SplitModel:
    """Check once that the part's answer is whole on all ranks of its stage."""

    def look(_: nn.Module, __: tuple[Any, ...], answer: Any) -> None:
        handle.remove()
        whole = [same_everywhere(model.group, each) for each in tree_leaves(answer) if isinstance(each, Tensor)]
        if not all(whole):
            raise ValueError(
                f"part {part} of the model answers another tensor on each rank of its stage; let a row layer, or "
                "column(gather=True), come before the cut: begin the next stage elsewhere, or change the rules"
            )

    handle = model.register_forward_hook(look)
    return model


def _check_shared(cut: Cut, ways: Mapping[str, Way], stages: int) -> None:
    """Weights of several parts must be split in all of them, and at different stages, which sum their gradients."""
    for name, users in cut.shared.items():
        split = {each.rpartition(".")[0] in ways for each in users.values()}
        if True in split and (len(split) > 1 or len({part % stages for part in users}) < len(users)):
            raise ValueError(
                f"{name} is used by the parts {sorted(users)} of the model, and split in some, or twice at one stage; "
                "give all layers that have it a rule, and one part at each stage"
            )


def cut_parameters(model: nn.Module) -> dict[str, Division]:
    """Cuts of the parameters of a stage's model, by the whole model's names."""
    found: dict[str, Division] = {}
    for each in split_models(model):
        found |= each.parts
    return found
