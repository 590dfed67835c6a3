"""How a model whose layers lie in parts goes on from a checkpoint: as it was, or in other parts.

the same strategy, and layers cut alike      each rank goes on with what it had: the same bits
other rules, other layers, more or fewer     parameters, buffers and the optimizer's state by the parameters' names, put
                                             together and cut anew; the strategy between replicas begins anew
"""

from __future__ import annotations

import sys

from polytempo.core.state import Saved
from polytempo.core.system.url_path import Place
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, read_part
from polytempo.training.checkpoint.manifest import Manifest
from polytempo.training.checkpoint.named_optimizer import load_by_names, optimizer_names
from polytempo.training.model.divided_tensors import PARTS, cuts_of
from polytempo.training.observe.whole_checkpoint import take, take_state, whole_checkpoint
from polytempo.training.parts.model_parts import ModelParts


def check_parted(manifest: Manifest, folder: Place, strategy: object) -> None:
    """ValueError where the checkpoint is not of a model in parts."""
    if PARTS not in manifest.about and "stages" not in manifest.about:
        raise ValueError(
            f"{folder} was saved by {manifest.about.get('strategy')}, whose workers hold whole layers, and {strategy} "
            "has them in parts; resume with the strategy that saved it, or load its parameters in the job's model(): "
            "pt.checkpoint_model(folder)"
        )


def cut_alike(parts: ModelParts, folder: Place, manifest: Manifest) -> bool:
    """Whether each rank finds in the checkpoint what it had."""
    if manifest.about.get("strategy") != str(parts.replica.strategy) or PARTS not in manifest.about:
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
    whole = whole_checkpoint(saved, manifest.mesh)
    own = parts.model.state_dict()
    parts.model.load_state_dict({name: take(parts.cut, parts.number, name, whole.tensors[name]) for name in own})
    optimizer = parts.replica.optimizer
    names = optimizer_names(optimizer, parts.model)
    load_by_names(optimizer, names, take_state(parts.cut, parts.number, whole), whole.groups)
    parts.replica.restore(Saved({}, {"step": manifest.step}))
    return saved[0]
