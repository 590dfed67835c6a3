"""`Holding`: a rank's share of the model: the whole of it, a stage, or parts of its layers.

             whole model                    saved with the rank                    another layout on resuming
Whole        the mean over replicas         –                                      –
HeldStage    each stage broadcasts          messages under way, optimizer names    cut again, by names
HeldParts    parts are gathered, joined     how tensors are cut, optimizer names   cut again, by names

The programs that train, save, score and resume ask a holding, and have no branches of their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port
from polytempo.core.state import Saved, Scalar
from polytempo.core.system.url_path import Place
from polytempo.partition.tensor.division import PARTS, Division, cuts_of, described
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, read_part
from polytempo.training.checkpoint.manifest import Manifest
from polytempo.training.checkpoint.optimizer_state import optimizer_restore
from polytempo.training.model.ports import DATA, mesh_of, ports_of
from polytempo.training.observe.whole_checkpoint import (
    NAMES,
    load_by_names,
    optimizer_names,
    take,
    take_state,
    under,
    whole_checkpoint,
)
from polytempo.training.parts.model_parts import ModelParts
from polytempo.training.pipeline.pipeline_stage import PipelineStage, WholeModel
from polytempo.training.step.guard import MODEL
from polytempo.training.step.replica import Replica

_STATE = "pipeline/"


@dataclass(frozen=True)
class Whole:
    """The whole model."""

    replica: Replica

    def data(self, port: Port) -> Port:
        """Ranks that hold the same parameters."""
        return ports_of(port).data

    async def whole(self, port: Port) -> WholeModel:
        """The model on every rank: the mean over replicas where they differ, of buffers as far as they must agree."""
        data = self.data(port)
        await self.replica.settle()
        return WholeModel(await self.replica.consensus(data), await self.replica.consensus_buffers(data))

    @property
    def late(self) -> int:
        """The number of last steps with gradients that `finish` applies."""
        return 0

    async def finish(self) -> list[Tensor]:
        """Losses of batches that were under way at the end of training."""
        return []

    async def row(self) -> dict[str, Any]:
        """Further numbers of a row of metrics."""
        return {}

    def about(self) -> dict[str, Scalar]:
        """The layout, for the manifest of a checkpoint."""
        return {}

    def saved(self, *, whole: bool) -> CheckpointPart:
        """Clients' states. `whole`: the optimizer is saved, too."""
        clients = self.replica.clients
        return CheckpointPart({}, {}) if clients is None else clients.saved(whole=whole)

    def check(self, manifest: Manifest, folder: Place) -> None:
        """ValueError where a checkpoint is of a model in another layout that this one cannot be made of."""
        ours, theirs = str(self.replica.strategy), manifest.about.get("strategy")
        if ours != theirs:
            raise ValueError(f"{folder} was saved by {theirs}, this run uses {ours}; use the same")

    def goes_on(self, folder: Place, manifest: Manifest) -> bool:
        """Each rank finds its own state in the checkpoint, so `restore` is not needed."""
        return True

    def restore(self, folder: Place, manifest: Manifest) -> CheckpointPart:
        """Take this rank's share of a model that was laid out otherwise. Returns a part with the run's position."""
        raise AssertionError("a whole model goes on as it is")

    def layers(self) -> list[dict[str, Any]] | None:
        """Holders and traffic of each divided layer; see `Result.layers`."""
        return None

    def stage_report(self) -> dict[str, Any] | None:
        """Delays and memory of this stage; see `Result.stages`."""
        return None


@dataclass(frozen=True)
class HeldStage:
    """A stage of the model, or a part of one. See `Whole` for the methods."""

    divided: PipelineStage

    @property
    def replica(self) -> Replica:
        """The stage's."""
        return self.divided.replica

    def data(self, port: Port) -> Port:
        """Replicas of this stage."""
        return self.divided.ports.data

    async def whole(self, port: Port) -> WholeModel:
        """Cost: each stage broadcasts once."""
        return await self.divided.whole()

    @property
    def late(self) -> int:
        """0 for a schedule that waits."""
        return self.divided.late

    async def finish(self) -> list[Tensor]:
        """Empties the pipeline."""
        return await self.divided.finish()

    async def row(self) -> dict[str, Any]:
        """Mean delay of each stage's updates."""
        return {"delays": await self.divided.delays()}

    def about(self) -> dict[str, Scalar]:
        """Numbers of stages and of the ranks that hold one together."""
        split: dict[str, Scalar] = {PARTS: self.divided.holders.size} if self.divided.split else {}
        return {"stages": self.divided.schedule.stages, **split}

    def saved(self, *, whole: bool) -> CheckpointPart:
        """Messages and parameter versions under way, and how the stage is divided."""
        stage, state = self.divided, self.divided.state()
        tensors = {f"{_STATE}{name}": tensor for name, tensor in state.tensors.items()}
        scalars: dict[str, Scalar] = {f"{_STATE}{name}": value for name, value in state.scalars.items()}
        if stage.split:
            scalars[PARTS] = described(stage.holder, stage.divisions)
        if whole:
            scalars[NAMES] = json.dumps(optimizer_names(stage.optimizer, stage.model))
        return CheckpointPart(tensors, scalars)

    def check(self, manifest: Manifest, folder: Place) -> None:
        """Stages are made of stages and of parts of layers."""
        _check_divided(manifest, folder, f"{self.replica.strategy} cuts it")

    def goes_on(self, folder: Place, manifest: Manifest) -> bool:
        """Never: `restore` also takes over messages under way."""
        return False

    def restore(self, folder: Place, manifest: Manifest) -> CheckpointPart:
        """The same strategy and mesh: all that was under way goes on. Others: the model and the optimizer's state."""
        stage = self.divided
        port = stage.ports.whole
        if manifest.about.get("strategy") == str(stage.replica.strategy) and manifest.mesh == mesh_of(port):
            own = read_part(folder, port.rank)
            first = manifest.mesh.rank({**manifest.mesh.coordinates(port.rank), DATA: 0})
            whole = own if "optimizer" in own.scalars else read_part(folder, first)
            stage.model.load_state_dict(under(whole.tensors, MODEL))
            optimizer_restore(stage.optimizer, Saved(whole.tensors, whole.scalars))
            stage.replica.restore(Saved(under(own.tensors, "strategy/"), under(own.scalars, "strategy/")))
            stage.restore(Saved(under(own.tensors, _STATE), under(own.scalars, _STATE)))
            return own
        lost = "stages or replicas, and gradients under way are left out"
        found = _cut_again(folder, manifest, port, stage.model, stage.optimizer, stage.divisions, stage.holder, lost)
        stage.replica.restore(Saved({}, {"step": manifest.step}))
        stage.begin(manifest.step)
        return found

    def layers(self) -> list[dict[str, Any]] | None:
        """None: stages have `stage_report`."""
        return None

    def stage_report(self) -> dict[str, Any] | None:
        """Delays, versions and layers."""
        return self.divided.report()


@dataclass(frozen=True)
class HeldParts:
    """Parts of some layers, and the other layers whole. See `Whole` for the methods."""

    divided: ModelParts

    @property
    def replica(self) -> Replica:
        """The replica of the model with these parts."""
        return self.divided.replica

    def data(self, port: Port) -> Port:
        """Ranks with the same parts."""
        return self.divided.ports.data

    async def whole(self, port: Port) -> WholeModel:
        """Cost: gathers of all parts."""
        return await self.divided.whole()

    @property
    def late(self) -> int:
        """No gradient is."""
        return 0

    async def finish(self) -> list[Tensor]:
        """No batch is under way."""
        return []

    async def row(self) -> dict[str, Any]:
        """Nothing further."""
        return {}

    def about(self) -> dict[str, Scalar]:
        """Number of ranks that hold a model together."""
        return {PARTS: self.divided.ports.model.size}

    def saved(self, *, whole: bool) -> CheckpointPart:
        """The strategy is the same, and the tensors' cuts are."""
        names = optimizer_names(self.replica.optimizer, self.replica.model)
        return CheckpointPart({}, {PARTS: self.divided.described(), NAMES: json.dumps(names)})

    def check(self, manifest: Manifest, folder: Place) -> None:
        """Parts of layers are made of stages and of parts of layers."""
        _check_divided(manifest, folder, f"{self.replica.strategy} divides layers")

    def goes_on(self, folder: Place, manifest: Manifest) -> bool:
        """The strategy is the same, and so is how each tensor was cut."""
        parts = self.divided
        if manifest.about.get("strategy") != str(parts.replica.strategy) or PARTS not in manifest.about:
            return False
        saved = read_part(folder, 0)
        return manifest.about[PARTS] == parts.ports.model.size and cuts_of(str(saved.scalars[PARTS]))[1] == parts.cut

    def restore(self, folder: Place, manifest: Manifest) -> CheckpointPart:
        """Parameters, buffers and the optimizer's state by names; the strategy between replicas begins again."""
        parts, replica = self.divided, self.replica
        lost = "parts, and the strategy between replicas begins again"
        port, cut, number = parts.ports.whole, parts.cut, parts.number
        found = _cut_again(folder, manifest, port, parts.model, replica.optimizer, cut, number, lost)
        replica.restore(Saved({}, {"step": manifest.step}))
        return found

    def layers(self) -> list[dict[str, Any]] | None:
        """Holders and traffic of each divided layer; see `Result.layers`."""
        return self.divided.report()

    def stage_report(self) -> dict[str, Any] | None:
        """None: there is one stage."""
        return None


Holding = Whole | HeldStage | HeldParts


def _check_divided(manifest: Manifest, folder: Place, ours: str) -> None:
    if PARTS not in manifest.about and "stages" not in manifest.about:
        raise ValueError(
            f"{folder} was saved by {manifest.about.get('strategy')} with the whole model on each worker, and {ours}; "
            "resume with the strategy that saved it, or load its parameters in the job's model(): "
            "pt.training.checkpoint_model(folder)"
        )


def _cut_again(
    folder: Place,
    manifest: Manifest,
    port: Port,
    model: nn.Module,
    optimizer: Optimizer,
    cut: Mapping[str, Division],
    number: int,
    others: str,
) -> CheckpointPart:
    """Join the model and the optimizer's state of all ranks' files, and take share `number` of them."""
    if port.rank == 0:
        print(
            f"note: {folder} was saved by {manifest.about.get('strategy')} in a {manifest.mesh}: the model and the "
            f"optimizer's state go on in other {others}",
            file=sys.stderr,
        )
    saved = [read_part(folder, rank) for rank in range(len(manifest.parts))]
    whole = whole_checkpoint(saved, manifest.mesh)
    model.load_state_dict({name: take(cut, number, name, whole.tensors[name]) for name in model.state_dict()})
    load_by_names(optimizer, optimizer_names(optimizer, model), take_state(cut, number, whole), whole.groups)
    return saved[0]
