"""Rounds of a simulated run on a cluster `in_bucket`: a strategy's meetings with the requests of an object store.

every(100, t)    ──▶    every(100, meet, then t)        priced by `worlds.object_store.round_cost`
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from polytempo.core import Bundle, Port, State, Transform
from polytempo.core.calls.refusals import refuse
from polytempo.spec.run_spec import RunSpec
from polytempo.training.own_loop.store_log_loop import pushes_movements
from polytempo.training.own_loop.store_loop import check_rare
from polytempo.worlds.object_store.round_cost import meeting


def in_bucket(spec: RunSpec) -> RunSpec:
    """The run with meetings as in a bucket. `Incompatible` (PT29xx) for strategies that cannot meet there."""
    if pushes_movements(spec.strategy):
        refuse({"object store", "simulated log"}, strategy=spec.strategy)
    timed = check_rare(spec.strategy, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    return replace(spec, strategy=replace(spec.strategy, parameters=timed.around(_in_round)))


def _in_round(transform: Transform) -> Transform:
    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        await meeting(port)
        return await transform.apply(port, bundle, state)

    return transform._replace(apply=apply)
