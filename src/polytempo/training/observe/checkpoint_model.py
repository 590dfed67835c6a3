"""`checkpoint_model`: the whole model of a checkpoint, for a plain module in any program."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from polytempo.core.system.url_path import Place, place
from polytempo.training.checkpoint.checkpoint_files import read_manifest, read_part
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.training.checkpoint.manifest import COMPLETE, Manifest
from polytempo.training.model.divided_tensors import PARTS
from polytempo.training.model.ports import DATA
from polytempo.training.observe.whole_checkpoint import whole_model


def checkpoint_model(path: str | Path) -> dict[str, Tensor]:
    """The parameters and buffers of the model that a run has saved, by the names that the job's model has.

        net.load_state_dict(pt.checkpoint_model("runs/mine"))

    `path`: a run's folder, its `checkpoint` folder, or one step in it; without a step, the newest. For every strategy
    and every cut the answer is the whole model: stages and parts of layers are put together, and where workers hold
    models that differ, it is their mean. Memory: all that the checkpoint holds.

    Errors: ValueError where there is no checkpoint, and for a checkpoint of `pt.init(mesh=…)` with parts that a job has
    made; `CheckpointError` for a damaged one.
    """
    folder = _step(place(path))
    manifest = read_manifest(folder)
    saved = [read_part(folder, rank) for rank in range(len(manifest.parts))]
    if PARTS not in manifest.about and "stages" not in manifest.about and _has_parts(manifest):
        raise ValueError(
            f"{folder} was saved by ranks in a {manifest.mesh}, whose parts of a model the job itself has made; read "
            "each rank's own file: rank-0.safetensors, …"
        )
    return whole_model(saved, manifest.mesh)


def _step(given: Place) -> Place:
    if COMPLETE.fullmatch(given.name):
        return given
    folder = latest(given) or latest(given / "checkpoint")
    if folder is None:
        raise ValueError(f"there is no checkpoint in {given}; give a run's folder, which has one if it was saved")
    return folder


def _has_parts(manifest: Manifest) -> bool:
    return any(length > 1 for axis, length in manifest.mesh.axes if axis != DATA)
