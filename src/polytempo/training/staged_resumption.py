"""How a pipeline goes on from a checkpoint: as it was, or in other stages, by another schedule, with other replicas.

the same strategy and mesh    what was under way goes on: the same bits as without the interruption
another one                   parameters, buffers and the optimizer's state by the parameters' names; the pipeline
                              begins empty, and the strategy between replicas anew
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Mesh
from polytempo.core.state import Saved, Scalar
from polytempo.core.url_path import Place
from polytempo.spec.plain_values import typed
from polytempo.training.checkpoint import CheckpointPart, ForeignCheckpoint, read_part
from polytempo.training.manifest import Manifest
from polytempo.training.optimizer_state import optimizer_restore
from polytempo.training.pipeline.pipeline_stage import PipelineStage
from polytempo.training.ports import DATA, mesh_of
from polytempo.training.saved_model import mean_of

NAMES = "optimizer parameters"
"""The scalar that has the names of the optimizer's parameters, in its order."""
_STATE = "pipeline/"


def pipeline_part(stage: PipelineStage, *, whole: bool) -> CheckpointPart:
    """What a stage saves besides what every rank does. `whole`: its optimizer is saved, too."""
    state = stage.state()
    tensors = {f"{_STATE}{name}": tensor for name, tensor in state.tensors.items()}
    scalars: dict[str, Scalar] = {f"{_STATE}{name}": value for name, value in state.scalars.items()}
    if whole:
        scalars[NAMES] = json.dumps(optimizer_names(stage.optimizer, stage.model))
    return CheckpointPart(tensors, scalars)


def optimizer_names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """The model's names of the optimizer's parameters, in the order in which its state counts them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def check_staged(manifest: Manifest, folder: Place, strategy: object) -> None:
    """ValueError where the checkpoint is not of a pipeline."""
    if "stages" not in manifest.about:
        raise ValueError(
            f"{folder} was saved by {manifest.about.get('strategy')}, whose workers hold the whole model, and "
            f"{strategy} cuts it; resume with the strategy that saved it, or load its parameters in the job's model()"
        )


def restore_stage(stage: PipelineStage, folder: Place, manifest: Manifest) -> CheckpointPart:
    """Let `stage` have what ranks have saved. Returns a part from which the run's position can be read."""
    port = stage.ports.whole
    if manifest.about.get("strategy") == str(stage.replica.strategy) and manifest.mesh == mesh_of(port):
        own = read_part(folder, port.rank)
        whole = own if "optimizer" in own.scalars else read_part(folder, stage.number)
        stage.model.load_state_dict(under(whole.tensors, "model/"))
        optimizer_restore(stage.optimizer, Saved(whole.tensors, whole.scalars))
        strategy = Saved(under(own.tensors, "strategy/"), under(own.scalars, "strategy/"))
        stage.replica.restore(strategy)
        stage.restore(Saved(under(own.tensors, _STATE), under(own.scalars, _STATE)))
        return own
    if port.rank == 0:
        print(
            f"note: {folder} was saved by {manifest.about.get('strategy')} in a {manifest.mesh}: the model and the "
            "optimizer's state go on in other stages or replicas, and gradients under way are left out",
            file=sys.stderr,
        )
    parts = [read_part(folder, rank) for rank in range(len(manifest.parts))]
    _restore_by_names(stage, parts, manifest.mesh)
    stage.replica.restore(Saved({}, {"step": manifest.step}))
    stage.begin(manifest.step)
    return parts[0]


def _restore_by_names(stage: PipelineStage, parts: list[CheckpointPart], mesh: Mesh) -> None:
    """Parameters and buffers: their mean where replicas have saved their own. The optimizer's: the first one's."""
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, tensor in under(part.tensors, "model/").items():
            found.setdefault(name, []).append(tensor)
    stage.model.load_state_dict({name: mean_of(several) for name, several in found.items()})
    first = [part for rank, part in enumerate(parts) if mesh.coordinates(rank).get(DATA, 0) == 0]
    described = [json.loads(str(part.scalars["optimizer"])) for part in first]
    state: dict[str, dict[str, Any]] = {}
    for part, about in zip(first, described, strict=True):
        names = json.loads(str(part.scalars[NAMES]))
        for index, entries in about["numbers"].items():
            state.setdefault(names[int(index)], {}).update(entries)
        for path, tensor in under(part.tensors, "optimizer/").items():
            index, key = path.split("/")
            state.setdefault(names[int(index)], {})[key] = tensor
    load_by_names(stage.optimizer, optimizer_names(stage.optimizer, stage.model), state, described[0]["groups"])


def load_by_names(
    optimizer: Optimizer, names: list[str], state: Mapping[str, Any], groups: list[dict[str, Any]]
) -> None:
    """The optimizer's state by its parameters' names, and its groups' numbers by their order."""
    now = optimizer.state_dict()
    if len(groups) != len(now["param_groups"]):
        raise ForeignCheckpoint(
            f"the optimizer has {len(now['param_groups'])} parameter groups in this stage, and the saved one had "
            f"{len(groups)}; resume with as many stages as saved it"
        )
    taken = [
        {key: typed(value, old.get(key)) for key, value in group.items()} | {"params": old["params"]}
        for group, old in zip(groups, now["param_groups"], strict=True)
    ]
    mine = {index: dict(state[name]) for index, name in enumerate(names) if name in state}
    optimizer.load_state_dict({"state": mine, "param_groups": taken})


def under(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
