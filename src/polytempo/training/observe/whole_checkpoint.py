"""The whole model and its optimizer's state, from the files of ranks with stages, parts of layers, or both.

ranks of a stage   [ part 0 | part 1 ]  joined by how each tensor was cut    stage 0 ─┐
                   [ part 0 | part 1 ]                                       stage 1 ─┴─▶ the model, by its own names
replicas           the mean where they differ; of the optimizer's state the first one's
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.aggregation.peer_models import GROUP
from polytempo.core import Mesh
from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath, place
from polytempo.partition.tensor.division import PARTS, Division, cuts_of
from polytempo.spec.text.plain_values import typed
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, ForeignCheckpoint, read_manifest, read_part
from polytempo.training.checkpoint.checkpoint_folders import complete_in, latest
from polytempo.training.checkpoint.manifest import COMPLETE, along_data
from polytempo.training.checkpoint.optimizer_state import load_exactly
from polytempo.training.job.evaluate import AVERAGE
from polytempo.training.model.ports import DATA, STAGE
from polytempo.training.observe.saved_model import mean_of
from polytempo.training.served.served_model import has_served_model, read_served_model
from polytempo.training.step.guard import MODEL


class WholeCheckpoint(NamedTuple):
    """The common checkpoint of all ranks."""

    tensors: dict[str, Tensor]
    """Parameters and buffers by the model's names."""
    state: dict[str, dict[str, Any]]
    """The optimizer's, by its parameters' names."""
    groups: list[dict[str, Any]]


def whole_checkpoint(saved: Sequence[CheckpointPart], mesh: Mesh) -> WholeCheckpoint:
    """The model in the files of all ranks, which were laid out as `mesh`. ValueError for missing parts of the model."""
    tensors, state, groups = dict[str, Tensor](), dict[str, dict[str, Any]](), list[dict[str, Any]]()
    for holders in _by_stage(saved, mesh):
        tensors |= _joined_model(holders)
        own, groups = _joined_optimizer([several[0] for several in holders])
        for name, entries in own.items():
            state.setdefault(name, {}).update(entries)
    return WholeCheckpoint(tensors, state, groups)


def whole_model(saved: Sequence[CheckpointPart], mesh: Mesh, prefix: str = MODEL) -> dict[str, Tensor]:
    """Parameters and buffers alone, or the tensors under another prefix; see `whole_checkpoint`."""
    return {n: tensor for holders in _by_stage(saved, mesh) for n, tensor in _joined_model(holders, prefix).items()}


def take(cut: Mapping[str, Division], number: int, name: str, whole: Tensor) -> Tensor:
    """Part `number` of the whole tensor `name`, in memory of its own."""
    return cut[name].take(whole, number) if name in cut else whole.clone()


def take_state(cut: Mapping[str, Division], number: int, whole: WholeCheckpoint) -> dict[str, dict[str, Any]]:
    """The optimizer's state for part `number`: tensors of their parameter's size are cut like it."""
    shapes = {name: tensor.shape for name, tensor in whole.tensors.items()}
    return {
        name: {
            key: take(cut, number, name, value) if isinstance(value, Tensor) and value.shape == shapes[name] else value
            for key, value in entries.items()
        }
        for name, entries in whole.state.items()
    }


def _by_stage(saved: Sequence[CheckpointPart], mesh: Mesh) -> list[list[list[CheckpointPart]]]:
    """The `holders_of` each stage; a model without stages is one."""
    stages = mesh.lengths.get(STAGE, 1)
    found: list[list[CheckpointPart]] = [[] for _ in range(stages)]
    for rank, part in enumerate(saved):
        found[mesh.coordinates(rank).get(STAGE, 0)].append(part)
    return [holders_of(several) for several in found]


def holders_of(saved: Sequence[CheckpointPart]) -> list[list[CheckpointPart]]:
    """The ranks' files with models, by the number of their part; files of one number are replicas."""
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


def _joined_model(holders: Sequence[Sequence[CheckpointPart]], prefix: str = MODEL) -> dict[str, Tensor]:
    """The whole model's tensors by its names: replicas' mean where they have saved their own."""
    cut = _cut(holders[0][0])
    models = [[under(part.tensors, prefix) for part in several] for several in holders]
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


NAMES = "optimizer parameters"
"""The scalar that has the names of the optimizer's parameters, in its order."""


def optimizer_names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """The model's names of the optimizer's parameters, in its state's order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


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
    load_exactly(optimizer, {"state": mine, "param_groups": taken})


def under(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries with names that begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}


class RunModel(NamedTuple):
    """The model that a run has saved."""

    tensors: dict[str, Tensor]
    """Parameters and buffers by the model's names."""
    step: int
    strategy: str
    folder: Place
    """The folder of the checkpoint; with a parameter server, of all its snapshots."""


def checkpoint_model(path: str | Path, *, average: bool = False) -> dict[str, Tensor]:
    """The parameters and buffers of the model that a run has saved, by the names that the job's model has.

        net.load_state_dict(pt.training.checkpoint_model("runs/mine"))

    `path`: a run's folder, its `checkpoint` folder, or one step in it, also as "runs/mine@400"; without a step, the
    newest. For every strategy and every cut the answer is the whole model: stages and parts of layers are put together;
    where workers hold models that differ, it is their mean; of several groups, it is the first one's; with a parameter
    server, it is the model of the shards. `average`: with the moving average of its weights (`ema`), which the run
    scored. Memory: all that the checkpoint holds.

    Errors: ValueError where there is no checkpoint, or no average in it, and for a checkpoint of `pt.init(mesh=…)`
    with parts that a job has made; `CheckpointError` or `SnapshotError` for a damaged one.
    """
    return run_model(path, average=average).tensors


def load_run_model(model: nn.Module, path: str | Path | UrlPath, *, average: bool = False) -> RunModel:
    """Load the model of `checkpoint_model`. ForeignCheckpoint for a checkpoint of another model."""
    found = run_model(path, average=average)
    try:
        model.load_state_dict(found.tensors)
    except RuntimeError as error:
        raise ForeignCheckpoint(f"{path} does not fit this model ({error}); name the job that saved it") from error
    return found


def run_model(path: str | Path | UrlPath, *, average: bool | None = False) -> RunModel:
    """`checkpoint_model`, with its step and the strategy that saved it. `average`: None takes it where there is one."""
    run, step = _at_step(path)
    root = run / "checkpoint" if (run / "checkpoint").is_dir() else run
    if has_served_model(root):
        return RunModel(*read_served_model(root, step, average=average), root)
    folder = _step(run) if step is None else _complete_at(run, step)
    manifest = read_manifest(folder)
    mesh, ranks = manifest.mesh, list(range(len(manifest.parts)))
    if GROUP in mesh.lengths:  # groups have a model each, and their workers have whole ones
        ranks = [rank for rank in ranks if not mesh.coordinates(rank).get(GROUP, 0)]
        mesh = along_data(len(ranks))
    saved = [read_part(folder, rank) for rank in ranks]
    has_parts = any(length > 1 for axis, length in mesh.axes if axis != DATA)
    if PARTS not in manifest.about and "stages" not in manifest.about and has_parts:
        raise ValueError(
            f"{folder} was saved by ranks in a {manifest.mesh}, and the job itself has made parts of a model; read "
            "each rank's own file: rank-0.safetensors, …"
        )
    tensors = whole_model(saved, mesh)
    if average is not False:
        if not (averaged := whole_model(saved, mesh, AVERAGE)) and average:
            raise ValueError(f"{folder} has no moving average of the weights: the run had no ema; read the weights")
        tensors |= averaged
    return RunModel(tensors, manifest.step, str(manifest.about.get("strategy")), folder)


def export_checkpoint(path: str | Path | UrlPath, file: Place) -> None:
    """Write the model of a checkpoint as safetensors, with the moving average of its weights where there is one.

    Metadata: strategy and step. Errors: as in `checkpoint_model`. Memory: twice the model, and the checkpoint.
    """
    saved = run_model(path, average=None)
    tensors = {name: each.clone(memory_format=torch.contiguous_format) for name, each in saved.tensors.items()}
    about = {"format": "pt", "strategy": saved.strategy, "step": str(saved.step)}
    files.made(file.parent)
    files.replace(file, safetensors.torch.save(tensors, metadata=about))


def _at_step(path: str | Path | UrlPath) -> tuple[Place, int | None]:
    """A run's folder, and the step behind its @."""
    run, at, step = str(path).rpartition("@")
    if at and step.isdecimal():
        return place(run), int(step)
    return place(path), None


def _complete_at(run: Place, step: int) -> Place:
    found = {**complete_in(run), **complete_in(run / "checkpoint")}
    if step not in found:
        there = ", ".join(map(str, sorted(found))) or "none"
        raise ValueError(f"there is no checkpoint of step {step} in {run}; it has steps {there}")
    return found[step]


def _step(given: Place) -> Place:
    if COMPLETE.fullmatch(given.name):
        return given
    folder = latest(given) or latest(given / "checkpoint")
    if folder is None:
        raise ValueError(f"there is no checkpoint in {given}; give a run's folder, which has one if it was saved")
    return folder
