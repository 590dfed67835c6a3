"""The model that a checkpoint holds, without the run that saved it."""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor, nn

from polytempo.core.state import Scalar
from polytempo.core.system.url_path import Place
from polytempo.training.checkpoint.checkpoint_files import ForeignCheckpoint, read_manifest, read_part
from polytempo.training.checkpoint.checkpoint_folders import CheckpointError, latest
from polytempo.training.checkpoint.manifest import COMPLETE
from polytempo.training.job.evaluate import AVERAGE
from polytempo.training.model.ports import DATA, STAGE
from polytempo.training.step.guard import MODEL


def checkpoint_in(run: Place) -> Place:
    """The newest checkpoint of the run in folder `run`; or `run` itself, where it is a checkpoint's own folder."""
    if COMPLETE.fullmatch(run.name):
        return run
    root = run / "checkpoint"
    found = latest(root)
    if found is not None:
        return found
    if root.is_dir() and any(re.fullmatch(r"snapshot-.*-run\.json", entry.name) for entry in root.iterdir()):
        raise ValueError(
            f"{root} holds snapshots of a parameter server, which this does not read; train with a strategy that has "
            "none, such as sync_sgd or local_sgd"
        )
    raise ValueError(
        f"there is no checkpoint in {root}; name a run's folder (train with --out), or one of a checkpoint, such as "
        "runs/first/checkpoint/step-00000100"
    )


def run_of(folder: Place) -> Place:
    """The folder of the run that `folder`, its own or a checkpoint's, belongs to."""
    return folder.parent.parent if COMPLETE.fullmatch(folder.name) else folder


def saved_model(folder: Place, prefix: str = MODEL) -> tuple[int, dict[str, Tensor]]:
    """The step of checkpoint `folder`, and its model as a state dict: the ranks' mean where they differ.

    Stages of a pipeline are put together. Memory: the models of all ranks that saved their own.
    Errors: ValueError where ranks hold parts of layers or models of several groups; CheckpointError for a damaged file.
    """
    manifest = read_manifest(folder)
    others = [axis for axis, length in manifest.mesh.axes if axis not in (DATA, STAGE) and length > 1]
    if others:
        raise ValueError(
            f"{folder} was saved by ranks in a {manifest.mesh}, which hold other models or other parts along "
            f"{', '.join(others)}; only checkpoints of one whole model, or of its stages, can be read"
        )
    found: dict[str, list[Tensor]] = defaultdict(list)
    for rank in range(len(manifest.parts)):
        for name, tensor in read_part(folder, rank).tensors.items():
            if name.startswith(prefix):
                found[name.removeprefix(prefix)].append(tensor)
    if not found:
        raise CheckpointError(f"{folder} has no tensors under {prefix!r}; a moving average needs a run with ema")
    return manifest.step, {name: mean_of(several) for name, several in found.items()}


def saved_about(folder: Place) -> dict[str, Scalar]:
    """The notes of checkpoint `folder` about its run: job, strategy, ranks."""
    return read_manifest(folder).about


def load_saved(model: nn.Module, folder: Place, *, average: bool = False) -> int:
    """Load checkpoint `folder` into `model`; returns its step. `average`: the moving average of its weights.

    Errors: ForeignCheckpoint for another model's checkpoint; CheckpointError if a run without `ema` saved it.
    """
    step, tensors = saved_model(folder)
    if average:
        tensors |= saved_model(folder, AVERAGE)[1]
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ForeignCheckpoint(f"{folder} does not fit this model ({error}); name the job that saved it") from error
    return step


def mean_of(tensors: list[Tensor]) -> Tensor:
    """The mean of several ranks' tensors; of tensors without a mean the first one."""
    same = len(tensors) == 1 or not tensors[0].is_floating_point()
    return tensors[0] if same else torch.stack(tensors).mean(dim=0)
