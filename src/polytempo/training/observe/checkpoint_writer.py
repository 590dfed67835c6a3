"""A training run's checkpoints: each rank saves its part, now or when its exchanges have landed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from polytempo.core import Mesh, NotFinite, Port, Work
from polytempo.core.state import Late, Saved, Scalar, copied, saved_states, settled
from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.report.status.records import CheckpointSaved, row_of
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, commit, write_part
from polytempo.training.checkpoint.checkpoint_folders import final_folder, partial_folder
from polytempo.training.checkpoint.optimizer_state import optimizer_saved, schedule_saved
from polytempo.training.job.context import TrainingContext
from polytempo.training.job.evaluate import AVERAGE, AVERAGED_STEPS
from polytempo.training.model.agree import gather_json
from polytempo.training.model.ports import mesh_of
from polytempo.training.step.guard import MODEL, check_saved


async def save(port: Port, context: TrainingContext, root: Place) -> bool:
    """Every rank writes its part of a checkpoint in `root`; rank 0 of the world, `port`, then makes it the newest.
    Returns True on rank 0, unless a rank has left out its part.

    Where ranks along "data" hold equal parameters and optimizer state, the first of them writes these for all: so
    each part of a model is written once.
    """
    await context.replica.settle()
    part = _part(context, context.replica.state(), whole=_writes_all(port, context))
    step = context.replica.step
    hashes = await gather_json(port, written_part(context, root, step, port.rank, part))
    saved = port.rank == 0 and complete(root, step, hashes, about(port, context), mesh_of(port))
    await port.barrier()
    return saved


def written_part(context: TrainingContext, root: Place, step: int, rank: int, part: CheckpointPart) -> str:
    """`write_part` of the state, if it is finite: else it would take the place of a good checkpoint.

    Raises NotFinite before anything is written; where the run goes on (`allow_nan`), the answer is "" instead.
    """
    try:
        check_saved(part.tensors, context.unchecked, step, rank)
    except NotFinite as error:
        if not context.options.allow_nan:
            raise
        found = f"element {error.index} of {error.where} is {error.value}"
        print(
            f"rank {rank}: the checkpoint of step {step} is left out, for {found}; earlier ones stay", file=sys.stderr
        )
        return ""
    return write_part(root, step, rank, part)


def complete(root: Place, step: int, hashes: Sequence[str], notes: Mapping[str, Scalar], mesh: Mesh) -> bool:
    """`commit`, or where a rank has left out its part, removal of the others' parts. Returns True after a `commit`."""
    if all(hashes):
        commit(root, step, hashes, notes, mesh)
        return True
    with suppress(OSError):
        files.remove(partial_folder(root, step))
    return False


def saved_row(root: Place, step: int, seconds: float) -> dict[str, Any]:
    """The row of a checkpoint that is complete, after so much training."""
    return row_of(CheckpointSaved(step=step, at_s=seconds, path=f"{root.name}/{final_folder(root, step).name}"))


def part_of(port: Port, context: TrainingContext) -> CheckpointPart:
    """A copy of this rank's part at the present step. Nothing may be under way (see `Replica.settle`)."""
    part = _part(context, context.replica.state(), whole=_writes_all(port, context))
    return CheckpointPart({name: tensor.clone() for name, tensor in part.tensors.items()}, part.scalars)


async def write_when_landed(
    port: Port, context: TrainingContext, root: Place, written: Callable[[str], None]
) -> Work[None]:
    """Write this rank's part of a checkpoint of the present step without finishing exchanges under way.

    Exchanges that have not landed yet are copied when they land, before training uses them, and the part is written
    when the last one has; all else is as it is now. Then `written(sha256)` is called.
    """
    replica, under_way = context.replica, list[Late]()

    def noted(leaf: Late) -> Late:
        under_way.append(leaf)
        return leaf

    states = [(path, copied(state, noted)) for path, state in replica.states()]
    part = _part(context, Saved({}, {}), whole=_writes_all(port, context))
    if under_way:
        part = CheckpointPart({name: tensor.clone() for name, tensor in part.tensors.items()}, part.scalars)
    landing = {id(leaf): Late(await port.start(_landed(leaf)), 0) for leaf in under_way}
    step = replica.step

    async def write() -> None:
        settling = [(path, copied(state, lambda leaf: landing[id(leaf)])) for path, state in states]
        strategy = saved_states([(path, await settled(state)) for path, state in settling], step)
        tensors, scalars = _strategy_part(strategy)
        written(
            written_part(context, root, step, port.rank, CheckpointPart(part.tensors | tensors, part.scalars | scalars))
        )

    return await port.start(write())


async def _landed(leaf: Late) -> tuple[Any]:
    return (copied((await leaf.work)[leaf.part]),)


def about(port: Port, context: TrainingContext) -> dict[str, Scalar]:
    """Notes about the run for the manifest of a checkpoint."""
    more = context.holding.about()
    if context.average is not None:
        more["ema"] = context.average.decay
    return {"ranks": port.size, "strategy": str(context.replica.strategy), "job": context.job.name, **more}


def _writes_all(port: Port, context: TrainingContext) -> bool:
    """True if this rank writes model and optimizer for all."""
    alike = context.replica.strategy.synchronized and not context.replica.exchanges_parameters  # else optimizers differ
    return context.holding.data(port).rank == 0 or not alike


def _part(context: TrainingContext, strategy: Saved, *, whole: bool) -> CheckpointPart:
    tensors, scalars = _strategy_part(strategy)
    scalars["shard"] = json.dumps(context.shard.state_dict())
    scalars["seconds"] = context.seconds
    if context.scheduler is not None:
        scalars["schedule"] = schedule_saved(context.scheduler)
    if context.growth is not None:
        scalars["growth"] = context.growth.saved()
    if context.balance is not None:
        scalars["balance"] = context.balance.saved()
    if context.replica.masters is not None:
        scalars |= context.replica.masters.saved()
    if context.host is not None:
        scalars["callbacks"] = context.host.state()
    held = context.holding.saved(whole=whole)
    tensors |= held.tensors
    scalars |= held.scalars
    if whole:
        optimizer = optimizer_saved(context.replica.optimizer)
        tensors |= {f"{MODEL}{name}": tensor for name, tensor in context.replica.model.state_dict().items()}
        tensors |= optimizer.tensors
        scalars |= optimizer.scalars
        if context.average is not None:
            average = context.average.state_dict()
            tensors |= {f"{AVERAGE}{name}": tensor for name, tensor in average["average"].items()}
            scalars[AVERAGED_STEPS] = average["steps"]
    return CheckpointPart(tensors, scalars)


def _strategy_part(strategy: Saved) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    tensors = {f"strategy/{name}": tensor for name, tensor in strategy.tensors.items()}
    return tensors, {f"strategy/{name}": value for name, value in strategy.scalars.items()}
