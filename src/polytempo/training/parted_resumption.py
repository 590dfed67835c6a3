"""How a model whose layers lie in parts goes on from a checkpoint: as it was, or in other parts.

the same strategy, and layers cut alike      each rank goes on with what it had: the same bits
other rules, other layers, more or fewer     parameters, buffers and the optimizer's state by the parameters' names, put
                                             together and cut anew; the strategy between replicas begins anew
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polytempo.core.state import Saved
from polytempo.core.url_path import Place
from polytempo.partition.tensor.division import Division
from polytempo.training.checkpoint import CheckpointPart, read_part
from polytempo.training.manifest import Manifest
from polytempo.training.model_parts import ModelParts, cuts_of
from polytempo.training.saved_model import mean_of
from polytempo.training.staged_resumption import NAMES, load_by_names, optimizer_names, under

PARTS = "parts"
"""The scalar that says how a rank's tensors were cut; see `ModelParts.described`."""


def check_parted(manifest: Manifest, folder: Place, strategy: object) -> None:
    """ValueError where the checkpoint is not of a model in parts."""
    if PARTS not in manifest.about:
        raise ValueError(
            f"{folder} was saved by {manifest.about.get('strategy')}, whose workers hold whole layers, and {strategy} "
            "has them in parts; resume with the strategy that saved it, or load its parameters in the job's model(): "
            "pt.checkpoint_model(folder)"
        )


def cut_alike(parts: ModelParts, folder: Place, manifest: Manifest) -> bool:
    """Whether each rank finds in the checkpoint what it had."""
    if manifest.about.get("strategy") != str(parts.replica.strategy):
        return False
    saved = read_part(folder, 0)
    return manifest.about[PARTS] == parts.ports.model.size and cuts_of(str(saved.scalars[PARTS]))[1] == parts.cut


def restore_parts(parts: ModelParts, folder: Place, manifest: Manifest) -> CheckpointPart:
    """Let this rank have its parts of what ranks have saved. Returns a part to read the run's position from."""
    if parts.ports.whole.rank == 0:
        print(
            f"note: {folder} was saved by {manifest.about.get('strategy')} on {len(manifest.parts)} ranks: the model "
            "and the optimizer's state go on in other parts, and the strategy between replicas begins anew",
            file=sys.stderr,
        )
    saved = [read_part(folder, rank) for rank in range(len(manifest.parts))]
    holders = holders_of(saved)
    whole = whole_model(holders)
    own = parts.model.state_dict()
    parts.model.load_state_dict({name: _taken(parts, name, whole[name]) for name in own})
    state, groups = _whole_optimizer([several[0] for several in holders])
    optimizer = parts.replica.optimizer
    names = optimizer_names(optimizer, parts.model)
    taken = {
        name: {
            key: _taken(parts, name, value) if isinstance(value, Tensor) and value.shape == whole[name].shape else value
            for key, value in entries.items()
        }
        for name, entries in state.items()
    }
    load_by_names(optimizer, names, taken, groups)
    parts.replica.restore(Saved({}, {"step": manifest.step}))
    return saved[0]


def holders_of(saved: Sequence[CheckpointPart]) -> list[list[CheckpointPart]]:
    """The ranks' files that hold a model, by the number of their part; those of one number are replicas."""
    found: dict[int, list[CheckpointPart]] = {}
    for part in saved:
        if "optimizer" in part.scalars:
            number = cuts_of(str(part.scalars[PARTS]))[0] if PARTS in part.scalars else 0
            found.setdefault(number, []).append(part)
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"the parts {sorted(found)} of a model are not all there")
    return [found[number] for number in range(len(found))]


def whole_model(holders: Sequence[Sequence[CheckpointPart]]) -> dict[str, Tensor]:
    """The whole model's tensors by its names: replicas' mean where they have saved their own."""
    cut = _cut(holders[0][0])
    models = [[under(part.tensors, "model/") for part in several] for several in holders]
    each = [{name: mean_of([replica[name] for replica in several]) for name in several[0]} for several in models]
    return {name: _joined(cut, name, [part[name] for part in each]) for name in each[0]}


def _whole_optimizer(holders: Sequence[CheckpointPart]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
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


def _taken(parts: ModelParts, name: str, whole: Tensor) -> Tensor:
    return parts.cut[name].take(whole, parts.number) if name in parts.cut else torch.clone(whole)
