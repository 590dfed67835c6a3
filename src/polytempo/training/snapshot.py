"""What a training run saves at a step, and how it goes on from there, also with another number of ranks."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polytempo.core import Mesh, NotFinite, Port, Work
from polytempo.core.state import Late, Saved, Scalar, copied, settled
from polytempo.spec.plain_values import plain, typed
from polytempo.training.agree import agree, gather_json
from polytempo.training.checkpoint import (
    CheckpointPart,
    ForeignCheckpoint,
    commit,
    read_manifest,
    read_part,
    write_part,
)
from polytempo.training.checkpoint_folders import CheckpointError, latest, partial_folder
from polytempo.training.guard import MODEL, check_saved
from polytempo.training.optimizer_state import optimizer_restore, optimizer_saved
from polytempo.training.ports import DATA, mesh_of, ports_of
from polytempo.training.program import TrainingContext
from polytempo.training.replica import saved_states

V = TypeVar("V")


async def save(port: Port, context: TrainingContext, root: Path) -> None:
    """Every rank writes its part of a checkpoint in `root`; rank 0 of the world, `port`, then makes it the newest.

    Where ranks along "data" hold equal parameters and optimizer state, the first of them writes these for all: so
    each part of a model is written once.
    """
    await context.replica.settle()
    part = _part(context, context.replica.state(), whole=_writes_all(port, context))
    step = context.replica.step
    hashes = await gather_json(port, written_part(context, root, step, port.rank, part))
    if port.rank == 0:
        complete(root, step, hashes, about(port, context), mesh_of(port))
    await port.barrier()


def written_part(context: TrainingContext, root: Path, step: int, rank: int, part: CheckpointPart) -> str:
    """`write_part` of what `context` saves, if that is finite: else it would take the place of a good checkpoint.

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


def complete(root: Path, step: int, hashes: Sequence[str], notes: Mapping[str, Scalar], mesh: Mesh) -> None:
    """`commit`, or where a rank has left out its part, removal of the others' parts."""
    if all(hashes):
        commit(root, step, hashes, notes, mesh)
    else:
        shutil.rmtree(partial_folder(root, step), ignore_errors=True)


def part_of(port: Port, context: TrainingContext) -> CheckpointPart:
    """A copy of what this rank saves at the present step. Nothing may be under way (see `Replica.settle`)."""
    part = _part(context, context.replica.state(), whole=_writes_all(port, context))
    return CheckpointPart({name: tensor.clone() for name, tensor in part.tensors.items()}, part.scalars)


async def write_when_landed(
    port: Port, context: TrainingContext, root: Path, written: Callable[[str], None]
) -> Work[None]:
    """Write this rank's part of a checkpoint of the present step without finishing what is under way.

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
    """What the manifest of a checkpoint says of the run."""
    return {"ranks": port.size, "strategy": str(context.replica.strategy), "job": context.job.name}


def _writes_all(port: Port, context: TrainingContext) -> bool:
    """Whether this rank writes model and optimizer: one along "data" does for all where they are alike."""
    alike = context.replica.strategy.synchronized and not context.replica.exchanges_parameters  # else optimizers differ
    return ports_of(port).data.rank == 0 or not alike


async def load(port: Port, context: TrainingContext, root: Path) -> int:
    """Go on from the newest checkpoint in `root`; returns its step. All ranks must see the same folder.

    With another number of ranks along "data" than saved, rank r of them takes the optimizer and the strategy's state
    of saved rank r mod N; parameters are the saved ranks' mean where those differed. What saved ranks still owed
    (residuals of error feedback) goes to exactly one rank each, so that their sum stays what it was. Another mesh
    beside that is a ValueError.

    A learning rate that is given in the options replaces the saved one, in the proportions in which the job hands
    it to its parameter groups. Under a schedule that would not last, so another one than saved is a ValueError, as are
    another strategy and another job.
    """
    folder = latest(root)
    await agree(port, {"checkpoint": folder.name if folder else None})
    if folder is None:
        if any(root.glob("snapshot-*-run.json")):
            raise ValueError(
                f"{root} holds snapshots of a parameter server, and {context.replica.strategy} has none; resume with "
                "the --strategy that saved them, or check --out"
            )
        raise ValueError(f"there is no checkpoint in {root} to resume from; run without --resume, or check --out")
    manifest = read_manifest(folder)
    strategy = str(context.replica.strategy)
    saved, job = (manifest.about.get(name) for name in ("strategy", "job"))
    if saved != strategy:
        raise ValueError(f"{folder} was saved by {saved}, this run uses {strategy}; use the same")
    if job != context.job.name:
        raise ValueError(f"{folder} was saved by job {job!r}, this run trains {context.job.name!r}; use another --out")
    saved_ranks = _saved_ranks(folder, manifest.mesh, port)
    try:
        fresh = _go_on(ports_of(port).data, context, folder, saved_ranks)
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError, ValueError) as error:
        raise ForeignCheckpoint(
            f"{folder} does not fit this run ({type(error).__name__}: {error}); resume with the model and the "
            "optimizer that saved it, or begin another run in another folder"
        ) from error
    if context.options.lr is not None:
        _set_rates(context, fresh, folder)
    return context.replica.step


def _saved_ranks(folder: Path, saved: Mesh, port: Port) -> list[int]:
    """The saved ranks that held what this rank holds, along "data"."""
    mine = mesh_of(port)
    old, new = ({axis: n for axis, n in mesh.axes if axis != DATA and n > 1} for mesh in (saved, mine))
    if old != new:
        raise ValueError(
            f"{folder} was saved by ranks in a {saved}, and this run's are in a {mine}; only the number of ranks along "
            f"{DATA!r} may change: lay out this run like the saved one, or check --out"
        )
    own = saved.rank({axis: coordinate for axis, coordinate in mine.coordinates(port.rank).items() if axis != DATA})
    return saved.group(own, [DATA] if DATA in saved.lengths else [])


def _go_on(data: Port, context: TrainingContext, folder: Path, saved: Sequence[int]) -> list[Any]:
    """Take over what ranks `saved` that held the same. Returns the learning rates that were in force before."""
    own = read_part(folder, saved[data.rank % len(saved)])
    synchronized = context.replica.strategy.synchronized
    whole = own if "optimizer" in own.scalars else read_part(folder, saved[0])
    model = _under(whole.tensors, "model/")
    if not synchronized and len(saved) != data.size:
        parts = [_under(read_part(folder, rank).tensors, "model/") for rank in saved]
        model = {name: _mean([part[name] for part in parts]) for name in model}
    context.replica.model.load_state_dict(model)
    fresh = _rates(context.replica.optimizer)
    optimizer_restore(context.replica.optimizer, Saved(whole.tensors, whole.scalars))
    debtors = [own if s == data.rank else read_part(folder, saved[s]) for s in range(data.rank, len(saved), data.size)]
    context.replica.restore(_strategy(own), [_strategy(part) for part in debtors])
    context.shard.load_state_dict(json.loads(str(own.scalars["shard"])))
    context.seconds = float(own.scalars["seconds"] or 0.0)
    if context.scheduler is not None:
        schedule_restore(context.scheduler, str(own.scalars["schedule"]))
    return fresh


def _strategy(part: CheckpointPart) -> Saved:
    return Saved(_under(part.tensors, "strategy/"), _under(part.scalars, "strategy/"))


def _part(context: TrainingContext, strategy: Saved, *, whole: bool) -> CheckpointPart:
    tensors, scalars = _strategy_part(strategy)
    scalars["shard"] = json.dumps(context.shard.state_dict())
    scalars["seconds"] = context.seconds
    if context.scheduler is not None:
        scalars["schedule"] = schedule_saved(context.scheduler)
    if whole:
        optimizer = optimizer_saved(context.replica.optimizer)
        tensors |= {f"{MODEL}{name}": tensor for name, tensor in context.replica.model.state_dict().items()}
        tensors |= optimizer.tensors
        scalars |= optimizer.scalars
    return CheckpointPart(tensors, scalars)


def _strategy_part(strategy: Saved) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    tensors = {f"strategy/{name}": tensor for name, tensor in strategy.tensors.items()}
    return tensors, {f"strategy/{name}": value for name, value in strategy.scalars.items()}


def schedule_saved(scheduler: LRScheduler) -> str:
    """A schedule's state as JSON. Raises ValueError that names what JSON cannot hold."""
    return json.dumps(
        {key: plain(value, f"{type(scheduler).__name__}: {key!r}") for key, value in scheduler.state_dict().items()}
    )


def schedule_restore(scheduler: LRScheduler, text: str) -> None:
    """Load what `schedule_saved` returned into a schedule that was made alike."""
    scheduler.load_state_dict(typed(json.loads(text), scheduler.state_dict()))


def _rates(optimizer: Optimizer) -> list[Any]:
    """Each parameter group's learning rate; under a schedule, the one that it began with."""
    return [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]


def _set_rates(context: TrainingContext, rates: list[Any], folder: Path) -> None:
    optimizer = context.replica.optimizer
    if context.scheduler is None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return
    saved, given = ([float(rate) for rate in several] for several in (_rates(optimizer), rates))
    if saved != given:
        raise ValueError(
            f"{folder} goes on with its schedule, which began at learning rate {saved}, and lr={context.options.lr} "
            f"would begin it at {given}; resume without a learning rate"
        )


def _mean(tensors: list[Tensor]) -> Tensor:
    if not tensors[0].is_floating_point():
        return tensors[0]
    return torch.stack(tensors).mean(dim=0)


def _under(entries: Mapping[str, V], prefix: str) -> dict[str, V]:
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
