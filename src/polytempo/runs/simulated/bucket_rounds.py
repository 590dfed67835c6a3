"""Rounds of a simulated run on a cluster `in_bucket`: a strategy's meetings with the requests of an object store.

every(100, t)         ──▶    every(100, meet, then t)        priced by `worlds.object_store.round_cost`
push_movement(100)    ──▶    the same, in a log              see `bucket_log`
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from polytempo.core import Bundle, Port, State, Transform
from polytempo.core.strategy import ByMessages
from polytempo.data.shard import DataShard
from polytempo.runs.simulated.bucket_log import SimulatedLog
from polytempo.spec.job_calls import data_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.own_loop.store_log_loop import pushes_movements
from polytempo.training.own_loop.store_loop import check_rare
from polytempo.worlds.object_store.round_cost import meeting


def in_bucket(spec: RunSpec) -> RunSpec:
    """The run with meetings as in a bucket. `Incompatible` (PT29xx) for strategies that cannot meet there."""
    if pushes_movements(spec.strategy):
        return _in_log(spec)
    timed = check_rare(spec.strategy, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    return replace(spec, strategy=replace(spec.strategy, parameters=timed.around(_in_round)))


def _in_log(spec: RunSpec) -> RunSpec:
    strategy = spec.strategy
    assert strategy.server is not None, "it pushes movements"
    log = SimulatedLog(strategy.server, spec.workers, _steps(spec))
    parameters = log.through_log(strategy.parameters)
    return replace(spec, strategy=replace(strategy, meeting=ByMessages(), parameters=parameters, synchronized=False))


def _steps(spec: RunSpec) -> int | None:
    """The steps of each worker; None for a run until it reaches a goal."""
    options = spec.options
    if options.until or spec.epochs is None:
        return None if options.until else options.steps
    data = data_of(spec.job, options.data)
    shard = DataShard(data.training(), rank=0, size=spec.workers, batch_size=spec.batch_size, seed=spec.seed)
    steps = math.ceil(spec.epochs * len(shard))
    return steps if options.steps is None else min(steps, options.steps)


def _in_round(transform: Transform) -> Transform:
    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        await meeting(port)
        return await transform.apply(port, bundle, state)

    return transform._replace(apply=apply)
