"""The whole model and its optimizer's state, of what the ranks of a model in stages, in parts of layers, or both saved.

ranks of a stage   [ part 0 | part 1 ]  joined by how each tensor was cut    stage 0 ─┐
                   [ part 0 | part 1 ]                                       stage 1 ─┴─▶ the model, by its own names
replicas           the mean where they differ; of the optimizer's state the first one's
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from polytempo.core import Mesh
from polytempo.partition.tensor.division import Division
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart
from polytempo.training.checkpoint.named_optimizer import NAMES, under
from polytempo.training.model.divided_tensors import PARTS, cuts_of
from polytempo.training.model.ports import STAGE
from polytempo.training.observe.saved_model import mean_of


class WholeCheckpoint(NamedTuple):
    """What all ranks have saved together."""

    tensors: dict[str, Tensor]
    """Parameters and buffers by the model's names."""
    state: dict[str, dict[str, Any]]
    """The optimizer's, by its parameters' names."""
    groups: list[dict[str, Any]]
    """The optimizer's parameter groups, without their parameters."""


def whole_checkpoint(saved: Sequence[CheckpointPart], mesh: Mesh) -> WholeCheckpoint:
    """Of the files of all ranks, which were laid out as `mesh`. ValueError where parts of the model are missing."""
    tensors, state, groups = dict[str, Tensor](), dict[str, dict[str, Any]](), list[dict[str, Any]]()
    for holders in _by_stage(saved, mesh):
        tensors |= _joined_model(holders)
        own, groups = _joined_optimizer([several[0] for several in holders])
        for name, entries in own.items():
            state.setdefault(name, {}).update(entries)
    return WholeCheckpoint(tensors, state, groups)


def whole_model(saved: Sequence[CheckpointPart], mesh: Mesh) -> dict[str, Tensor]:
    """Parameters and buffers alone; see `whole_checkpoint`."""
    return {n: tensor for holders in _by_stage(saved, mesh) for n, tensor in _joined_model(holders).items()}


def take(cut: Mapping[str, Division], number: int, name: str, whole: Tensor) -> Tensor:
    """Of the whole tensor `name` what part `number` holds, in memory of its own."""
    return cut[name].take(whole, number) if name in cut else whole.clone()


def take_state(cut: Mapping[str, Division], number: int, whole: WholeCheckpoint) -> dict[str, dict[str, Any]]:
    """The optimizer's state of what part `number` holds: what is as large as its parameter is cut as that is."""
    shapes = {name: tensor.shape for name, tensor in whole.tensors.items()}
    return {
        name: {
            key: take(cut, number, name, value) if isinstance(value, Tensor) and value.shape == shapes[name] else value
            for key, value in entries.items()
        }
        for name, entries in whole.state.items()
    }


def _by_stage(saved: Sequence[CheckpointPart], mesh: Mesh) -> list[list[list[CheckpointPart]]]:
    """For each stage its `holders_of`; a model without stages is one."""
    stages = mesh.lengths.get(STAGE, 1)
    found: list[list[CheckpointPart]] = [[] for _ in range(stages)]
    for rank, part in enumerate(saved):
        found[mesh.coordinates(rank).get(STAGE, 0)].append(part)
    return [holders_of(several) for several in found]


def holders_of(saved: Sequence[CheckpointPart]) -> list[list[CheckpointPart]]:
    """The ranks' files that hold a model, by the number of their part; those of one number are replicas."""
    found: dict[int, list[CheckpointPart]] = {}
    for part in saved:
        if "optimizer" in part.scalars:
            number = cuts_of(str(part.scalars[PARTS]))[0] if PARTS in part.scalars else 0
            found.setdefault(number, []).append(part)
    if sorted(found) != list(range(len(found))):
        raise ValueError(
            f"of the model's parts only those numbered {sorted(found)} are there; bring the files of all ranks into "
            "one folder"
        )
    return [found[number] for number in range(len(found))]


def _joined_model(holders: Sequence[Sequence[CheckpointPart]]) -> dict[str, Tensor]:
    """The whole model's tensors by its names: replicas' mean where they have saved their own."""
    cut = _cut(holders[0][0])
    models = [[under(part.tensors, "model/") for part in several] for several in holders]
    each = [{name: mean_of([replica[name] for replica in several]) for name in several[0]} for several in models]
    return {name: _joined(cut, name, [part[name] for part in each]) for name in each[0]}


def _joined_optimizer(holders: Sequence[CheckpointPart]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The optimizer's state by parameters' names, and its groups. State as large as its parameter is cut as that is."""
    described = [json.loads(str(part.scalars["optimizer"])) for part in holders]
    names = json.loads(str(holders[0].scalars[NAMES]))
    state = {names[int(index)]: dict(entries) for index, entries in described[0]["numbers"].items()}
    cut, models = _cut(holders[0]), [under(part.tensors, "model/") for part in holders]
    for path in under(holders[0].tensors, "optimizer/"):
        index, key = path.split("/")
        name = names[int(index)]
        several = [part.tensors[f"optimizer/{path}"] for part in holders]
        whole = all(tensor.shape == model[name].shape for tensor, model in zip(several, models, strict=True))
        state.setdefault(name, {})[key] = _joined(cut, name, several) if whole else several[0]
    return state, described[0]["groups"]


def _cut(part: CheckpointPart) -> dict[str, Division]:
    return cuts_of(str(part.scalars[PARTS]))[1] if PARTS in part.scalars else {}


def _joined(cut: Mapping[str, Division], name: str, several: Sequence[Tensor]) -> Tensor:
    if name not in cut:
        return several[0]
    return cut[name].join(several)
