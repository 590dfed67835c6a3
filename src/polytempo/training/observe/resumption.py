"""A training run that goes on from a checkpoint, also with another number of ranks that hold the same parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polytempo.core import Mesh, Port, Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.core.state import Saved, Scalar
from polytempo.core.system.url_path import Place
from polytempo.spec.job_calls import moved_numbers, schedule_of
from polytempo.spec.rates.plateau import Plateau
from polytempo.training.checkpoint.checkpoint_files import CheckpointPart, ForeignCheckpoint, read_manifest, read_part
from polytempo.training.checkpoint.checkpoint_folders import CheckpointError, latest
from polytempo.training.checkpoint.manifest import Manifest
from polytempo.training.checkpoint.optimizer_state import (
    optimizer_restore,
    schedule_begun,
    schedule_forward,
    schedule_restore,
)
from polytempo.training.job.context import TrainingContext
from polytempo.training.job.evaluate import AVERAGE, AVERAGED_STEPS
from polytempo.training.model.agree import agree
from polytempo.training.model.ports import DATA, mesh_of, ports_of
from polytempo.training.observe.saved_model import mean_of
from polytempo.training.observe.whole_checkpoint import under
from polytempo.training.step.guard import MODEL


async def load(port: Port, context: TrainingContext, root: Place) -> int:
    """Go on from the newest checkpoint in `root`; returns its step. All ranks must see the same folder.

    With another number of ranks along "data" than saved, rank r of them takes the optimizer and the strategy's state of
    saved rank r mod N; parameters are the saved ranks' mean where those differed. Each saved rank's residuals of error
    feedback go to exactly one rank, so that their sum stays the same. Any other change of the mesh is a ValueError.

    A learning rate that is given in the options replaces the saved one, in the proportions of the job's parameter
    groups. Under the same schedule that would not last, so another one than saved is a ValueError, as are another
    strategy and another job.
    """
    folder = await _newest(port, root, context.replica.strategy)
    manifest = read_manifest(folder)
    _check(manifest, folder, context)
    with _fitting(folder):
        alike = context.holding.goes_on(folder, manifest)
    saved_ranks = _saved_ranks(folder, manifest.mesh, port) if alike else []
    with _fitting(folder):
        if alike:
            fresh = _go_on(ports_of(port).data, context, folder, saved_ranks)
        else:
            fresh = _rates(context.replica.optimizer)
            _take_position(context, context.holding.restore(folder, manifest))
    if context.options.lr is not None:
        _set_rates(context, fresh, folder)
    return context.replica.step


@contextmanager
def _fitting(folder: Place) -> Iterator[None]:
    """Inside, errors of a whole checkpoint become a ForeignCheckpoint."""
    try:
        yield
    except (CheckpointError, Incompatible):
        raise
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError, ValueError) as error:
        raise ForeignCheckpoint(
            f"{folder} does not fit this run ({type(error).__name__}: {error}); resume with the model and the "
            "optimizer that saved it, or begin another run in another folder"
        ) from error


async def _newest(port: Port, root: Place, strategy: Strategy) -> Place:
    """The newest checkpoint's folder, which must be the same on all ranks."""
    folder = latest(root)
    await agree(port, {"checkpoint": folder.name if folder else None})
    if folder is not None:
        return folder
    if any(re.fullmatch(r"snapshot-.*-run\.json", entry.name) for entry in (root.iterdir() if root.is_dir() else [])):
        raise ValueError(
            f"{root} holds snapshots of a parameter server, and {strategy} has none; resume with the --strategy that "
            "saved them, or check --out"
        )
    raise ValueError(f"there is no checkpoint in {root} to resume from; run without --resume, or check --out")


def _check(manifest: Manifest, folder: Place, context: TrainingContext) -> None:
    about, job = manifest.about, context.job.name
    context.holding.check(manifest, folder)
    saved, ours = (None if decay is None else float(decay) for decay in (about.get("ema"), context.options.ema))
    if saved != ours:
        said = [
            "without a moving average of weights" if each is None else f"with ema={each:g}" for each in (saved, ours)
        ]
        raise ValueError(f"{folder} was saved {said[0]}, and this run goes on {said[1]}; resume with the same ema")
    if about.get("job") != job:
        raise ValueError(f"{folder} was saved by job {about.get('job')!r}, this run trains {job!r}; use another --out")


def _saved_ranks(folder: Place, saved: Mesh, port: Port) -> list[int]:
    """The saved ranks with the same parameters as this rank, along "data"."""
    mine = mesh_of(port)
    old, new = ({axis: n for axis, n in mesh.axes if axis != DATA and n > 1} for mesh in (saved, mine))
    if old != new:
        raise ValueError(
            f"{folder} was saved by ranks in a {saved}, and this run's are in a {mine}; only the number of ranks along "
            f"{DATA!r} may change: lay out this run like the saved one, or check --out"
        )
    own = saved.rank({axis: coordinate for axis, coordinate in mine.coordinates(port.rank).items() if axis != DATA})
    return saved.group(own, [DATA] if DATA in saved.lengths else [])


def _go_on(data: Port, context: TrainingContext, folder: Place, saved: Sequence[int]) -> list[Any]:
    """Take over the state of the `saved` ranks with the same parameters. Returns the learning rates from before."""
    own = read_part(folder, saved[data.rank % len(saved)])
    synchronized = context.replica.strategy.synchronized
    whole = own if "optimizer" in own.scalars else read_part(folder, saved[0])
    weights = {name: tensor for name, tensor in whole.tensors.items() if name.startswith((MODEL, AVERAGE))}
    if not synchronized and len(saved) != data.size:
        parts = [read_part(folder, rank).tensors for rank in saved]
        weights = {name: mean_of([part[name] for part in parts]) for name in weights}
    context.replica.model.load_state_dict(under(weights, MODEL))
    if context.average is not None:
        steps, decay = whole.scalars[AVERAGED_STEPS], context.average.decay
        context.average.load_state_dict({"average": under(weights, AVERAGE), "steps": steps, "decay": decay})
    fresh = _rates(context.replica.optimizer)
    optimizer_restore(context.replica.optimizer, Saved(whole.tensors, whole.scalars))
    sources = [own if s == data.rank else read_part(folder, saved[s]) for s in range(data.rank, len(saved), data.size)]
    context.replica.restore(_strategy(own), [_strategy(part) for part in sources])
    if context.replica.clients is not None:
        context.replica.clients.restore(whole, sources, data.size)
    _take_position(context, own)
    return fresh


def _take_position(context: TrainingContext, own: CheckpointPart) -> None:
    """Take over the position in the data, in time and in the schedule."""
    context.shard.load_state_dict(json.loads(str(own.scalars["shard"])))
    context.seconds = float(own.scalars["seconds"] or 0.0)
    _take_schedule(context, own.scalars.get("schedule"))
    if context.growth is not None and "growth" in own.scalars:  # else the run has had no such rule so far
        context.growth.restore(str(own.scalars["growth"]), context.replica.step, context.shard)
    if context.balance is not None and "balance" in own.scalars:
        context.balance.restore(str(own.scalars["balance"]))
    if context.host is not None and "callbacks" in own.scalars:
        context.host.restore(str(own.scalars["callbacks"]))
    if context.replica.masters is not None:
        context.replica.masters.restore(own.scalars)


def _take_schedule(context: TrainingContext, text: Scalar) -> None:
    """Go on with the run's schedule; another one has the rates that it would have if the run had begun with it."""
    made, optimizer = context.scheduler, context.replica.optimizer
    saved: dict[str, Any] = json.loads(text) if isinstance(text, str) else {}
    if made is None:
        if "begun" in saved:
            schedule_begun(optimizer, saved["begun"])
        return
    if saved and saved.get("recipe") in (None, vars(made)["recipe"]):
        place = None if context.options.batch_growth else _place_in_schedule(context, made)
        schedule_restore(made, str(text), place)
        return
    rates = [float(group["lr"]) for group in optimizer.param_groups]  # a tensor is written in place below
    begun = saved.get("begun") if context.options.lr is None else vars(made)["begun"]
    schedule_begun(optimizer, begun or moved_numbers(optimizer))
    context.scheduler = scheduler = schedule_of(context.job, optimizer, vars(made)["epoch_steps"])
    if isinstance(scheduler, Plateau):
        scheduler.seen_step, scheduler.seen_epoch = context.replica.step, context.shard.epochs
        if "num_bad_epochs" in saved and context.options.lr is None:
            scheduler.hold(rates)
    elif scheduler is not None:
        schedule_forward(scheduler, _place_in_schedule(context, scheduler))


def _place_in_schedule(context: TrainingContext, scheduler: LRScheduler) -> int:
    """The steps behind a schedule; where it has lengths in epochs, by these, because their steps may be others now."""
    step, run, epochs = (context.replica.step, *(getattr(scheduler, name, None) for name in ("run_steps", "in_epochs")))
    shard, options = context.shard, context.options
    if options.batch_growth:
        return int(shard.epochs * vars(scheduler)["epoch_steps"] + 1e-6)
    if shard.num_samples is None or (epochs is None and run in (None, options.steps)):
        return step
    place = shard.epochs * len(shard)
    return step if abs(place - step) <= 1 else int(place + 1e-6)


def _strategy(part: CheckpointPart) -> Saved:
    return Saved(under(part.tensors, "strategy/"), under(part.scalars, "strategy/"))


def _rates(optimizer: Optimizer) -> list[Any]:
    """Each parameter group's learning rate; under a schedule, its first one."""
    return [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]


def _set_rates(context: TrainingContext, rates: list[Any], folder: Place) -> None:
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
