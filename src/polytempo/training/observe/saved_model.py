"""A run's newest checkpoint, and its notes."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from polytempo.core.state import Scalar
from polytempo.core.system.url_path import Place
from polytempo.training.checkpoint.checkpoint_files import read_manifest
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.training.checkpoint.manifest import COMPLETE


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
            f"{root} holds snapshots of a parameter server, which do not name their job, and the run has no result; "
            "run it to its end, or resume it"
        )
    raise ValueError(
        f"there is no checkpoint in {root}; name a run's folder (train with --out), or one of a checkpoint, such as "
        "runs/first/checkpoint/step-00000100"
    )


def run_of(folder: Place) -> Place:
    """The folder of the run that `folder`, its own, its checkpoints' or one checkpoint's, belongs to."""
    folder = folder.parent if COMPLETE.fullmatch(folder.name) else folder
    return folder.parent if folder.name == "checkpoint" else folder


def saved_about(folder: Place) -> dict[str, Scalar]:
    """The notes of checkpoint `folder` about its run: job, strategy, ranks."""
    return read_manifest(folder).about


def mean_of(tensors: list[Tensor]) -> Tensor:
    """The mean of several ranks' tensors; of equal tensors (frozen parameters), or without a mean, the first one."""
    first = tensors[0]
    same = not first.is_floating_point() or all(torch.equal(first, other) for other in tensors[1:])
    return tensors[0] if same else torch.stack(tensors).mean(dim=0)
