"""How a pipeline goes on from a checkpoint: as it was, or in other stages, by another schedule, with other replicas.

the same strategy and mesh    what was under way goes on: the same bits as without the interruption
another one                   parameters, buffers and the optimizer's state by the parameters' names; the pipeline
                              begins empty, and the strategy between replicas anew
"""

from __future__ import annotations

import json
import sys

from polytempo.core.state import Saved, Scalar
from polytempo.core.system.url_path import Place
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, read_part
from polytempo.training.checkpoint.manifest import Manifest
from polytempo.training.checkpoint.named_optimizer import NAMES, load_by_names, optimizer_names, under
from polytempo.training.checkpoint.optimizer_state import optimizer_restore
from polytempo.training.model.divided_tensors import PARTS, described
from polytempo.training.model.ports import DATA, mesh_of
from polytempo.training.observe.whole_checkpoint import WholeCheckpoint, take, take_state, whole_checkpoint
from polytempo.training.pipeline.pipeline_stage import PipelineStage

_STATE = "pipeline/"


def pipeline_part(stage: PipelineStage, *, whole: bool) -> CheckpointPart:
    """What a stage saves besides what every rank does. `whole`: its optimizer is saved, too."""
    state = stage.state()
    tensors = {f"{_STATE}{name}": tensor for name, tensor in state.tensors.items()}
    scalars: dict[str, Scalar] = {f"{_STATE}{name}": value for name, value in state.scalars.items()}
    if stage.split:
        scalars[PARTS] = described(stage.holder, stage.divisions)
    if whole:
        scalars[NAMES] = json.dumps(optimizer_names(stage.optimizer, stage.model))
    return CheckpointPart(tensors, scalars)


def check_staged(manifest: Manifest, folder: Place, strategy: object) -> None:
    """ValueError where the checkpoint is not of a pipeline."""
    if "stages" not in manifest.about and PARTS not in manifest.about:
        raise ValueError(
            f"{folder} was saved by {manifest.about.get('strategy')}, whose workers hold the whole model, and "
            f"{strategy} cuts it; resume with the strategy that saved it, or load its parameters in the job's model()"
        )


def restore_stage(stage: PipelineStage, folder: Place, manifest: Manifest) -> CheckpointPart:
    """Let `stage` have what ranks have saved. Returns a part from which the run's position can be read."""
    port = stage.ports.whole
    if manifest.about.get("strategy") == str(stage.replica.strategy) and manifest.mesh == mesh_of(port):
        own = read_part(folder, port.rank)
        first = manifest.mesh.rank({**manifest.mesh.coordinates(port.rank), DATA: 0})
        whole = own if "optimizer" in own.scalars else read_part(folder, first)
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
    _restore_by_names(stage, whole_checkpoint(parts, manifest.mesh))
    stage.replica.restore(Saved({}, {"step": manifest.step}))
    stage.begin(manifest.step)
    return parts[0]


def _restore_by_names(stage: PipelineStage, whole: WholeCheckpoint) -> None:
    """Parameters, buffers and the optimizer's state of this stage, or of the part of it that this rank has."""
    cut, number = stage.divisions, stage.holder
    names = stage.model.state_dict()
    stage.model.load_state_dict({name: take(cut, number, name, whole.tensors[name]) for name in names})
    own = optimizer_names(stage.optimizer, stage.model)
    load_by_names(stage.optimizer, own, take_state(cut, number, whole), whole.groups)
