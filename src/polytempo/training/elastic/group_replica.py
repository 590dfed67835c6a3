"""The beginning and the end of one group of ranks in an elastic run: hooks, its part of the data, and states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from polytempo.core import Port
from polytempo.core.state import Saved
from polytempo.data.shard import DataShard
from polytempo.membership.message import GroupView
from polytempo.spec.run_spec import RunSpec
from polytempo.training.elastic.elastic_state import (
    broadcast_buffers,
    broadcast_saved,
    hand_over_model,
    handed_over,
    handed_over_by_islands,
    residuals_by_path,
)
from polytempo.training.elastic.island_member import IslandMember
from polytempo.training.elastic.local_round import keep_mean
from polytempo.training.hooks.attach import AttachOptions, attach_alike, attach_replica
from polytempo.training.hooks.handle import Handle
from polytempo.training.step.parameter_exchange import Commit
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld


def attached(
    world: ProcessWorld,
    view: GroupView,
    spec: RunSpec,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    commit: Commit,
    island: IslandMember | None,
) -> Handle:
    """Give newcomers the model of the first rank, or of their island's first one, and attach it in this group."""
    hooked = spec.strategy.between_equals()  # slices are computed here, not by hooks
    if island is not None:
        hooked = island.fitted(hooked)
    asked, port = spec.options, world.port
    options = AttachOptions(
        on_drift=asked.on_drift, allow_nan=asked.allow_nan, commit=commit, precision=asked.precision
    )
    if not view.stateful:
        return attach_replica(model, optimizer, hooked, world=world, options=options._replace(seed=asked.seed))
    if newcomers := frozenset(range(view.stateful, world.size)):
        world.drive(hand_over_model(port, model, optimizer, newcomers))
    else:
        world.drive(broadcast_buffers(port, model))
    if island is not None and (newcomers := island.newcomers(view.stateful, port.rank)):
        world.drive(hand_over_model(island.inside(port), model, optimizer, newcomers))
    return attach_alike(model, optimizer, hooked, world=world, options=options)


def shard_of(spec: RunSpec, data: Any, rank: int, size: int, device: torch.device) -> DataShard:
    """The part of `rank` in batches of `size` ranks."""
    keeps_all = spec.options.scaling == "global"
    return DataShard(
        data.training(),
        rank=rank,
        size=size,
        batch_size=spec.batch_size,
        seed=spec.seed,
        global_batch_size=spec.global_batch_size if keeps_all else None,
        slices=spec.strategy.slices,
        micro_batches=spec.options.accumulate,
        device=device,
    )


async def given_to_newcomers(port: Port, mine: Saved, stateful: int, island: IslandMember | None) -> Saved:
    """The strategy's state of this rank; of a newcomer the state of the first rank, or of its island's first one."""
    if stateful < port.size:
        others = await broadcast_saved(port, mine)
        mine = Saved(others.tensors, mine.scalars) if port.rank >= stateful else mine
    if island is not None and island.newcomers(stateful, port.rank):
        others = await broadcast_saved(island.inside(port), mine)
        mine = Saved(others.tensors, mine.scalars) if port.rank >= stateful else mine
    return mine


async def left_behind(port: Port, replica: Replica, island: IslandMember | None, *, leaves: bool) -> Saved | None:
    """This rank's residuals from ranks that leave, at a border of steps, while all are there; None: none.

    With islands they stay in the island, if a member does.
    """
    await replica.settle()
    if replica.parameters is not None:
        with replica.in_float32():
            await keep_mean(port, replica.parameters.groups(), leaves=leaves, islands=numbers_of(island, port))
    residuals = residuals_by_path(replica.states())
    if not residuals:
        return None
    if island is None:
        return await handed_over(port, residuals, leaves=leaves)
    return await handed_over_by_islands(port, island.inside(port), residuals, leaves=leaves)


def numbers_of(island: IslandMember | None, port: Port) -> list[int] | None:
    """The number of each rank's island; None without islands."""
    return None if island is None else island.numbers(port.size)
