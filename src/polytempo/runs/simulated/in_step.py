"""Groups of workers of a simulation that are in step, so that one worker can compute and act for its group.

They hold equal parameters after every step, exchange nothing but a mean over all of them by the world's own collective,
compute equally fast, and get equally many samples in every step. An epoch's last batch may be dealt unevenly: then
there are two groups, and the first gets a sample more there.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from polytempo.cluster import Cluster, constant
from polytempo.core import Bundle, Port, Promise
from polytempo.core.strategy import any_optimizer
from polytempo.core.transform import is_idle
from polytempo.data.plan import alike
from polytempo.data.shard import DataShard
from polytempo.spec.job import Data
from polytempo.spec.run_spec import RunSpec
from polytempo.training.model.trainable_parameters import sparse_tables
from polytempo.worlds import VirtualWorld
from polytempo.worlds.virtual.clockwork import Asymmetric

_WIDE = (torch.float32, torch.float64)
"""Dtypes that hold the sum of many workers' gradients if they hold the mean."""


def groups_in_step(spec: RunSpec, cluster: Cluster, data: Data, dtypes: set[torch.dtype]) -> list[range]:
    """All workers, in a few groups that are in step; no groups if workers are not in step.

    `dtypes` are the parameters' dtypes.
    """
    strategy, options = spec.strategy, spec.options
    linear = strategy.synchronized and Promise.LINEAR in strategy.gradients.promises
    if options.balance == "speed":
        return []
    if spec.workers == 1 or spec.job.weight is not None or not linear or not is_idle(strategy.parameters, spec.workers):
        return []
    if strategy.fit is not any_optimizer or not dtypes.issubset(_WIDE):
        return []
    if cluster.stragglers is not constant() or cluster.faults or options.checkpoint_every is not None:
        return []
    shard = DataShard(data.training(), rank=0, size=spec.workers, batch_size=spec.batch_size)
    if not shard.in_memory or not _acts_for_all(spec, cluster):
        return []
    assert shard.num_samples is not None
    return alike(shard.num_samples, options.global_batch_size or shard.global_batch_size, spec.workers)


def groups_in_turn(spec: RunSpec, cluster: Cluster, data: Data, model: nn.Module) -> list[range]:
    """The groups of `groups_in_step` if one model can compute each worker's gradient separately, with the same bits.

    So the model has to be of torch's own layers, which remember nothing.
    """
    strategy, options = spec.strategy, spec.options
    if strategy.features - {"server"} or sparse_tables(model) or not all(map(_forgets, model.modules())):
        return []
    if (
        options.looks_every is not None
        or options.batch_growth
        or options.precision is not None
        or options.accumulate > 1
    ):
        return []
    return groups_in_step(spec, cluster, data, {p.dtype for p in model.parameters()})


def _forgets(module: nn.Module) -> bool:
    """True if a pass leaves the layer and its attachments unchanged."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    known = type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, LazyModuleMixin)
    return known and not module._buffers and not any(hooks) and getattr(module, "max_norm", None) is None


def _acts_for_all(spec: RunSpec, cluster: Cluster) -> bool:
    """True if some ranks can act for all, because the strategy's messages are one sum."""
    transform = spec.strategy.gradients

    async def program(port: Port) -> None:
        bundle = Bundle({"gradient": torch.empty(spec.workers, device="meta")})
        await port.compute(lambda: None, 1.0)
        await transform.apply(port, bundle, transform.init(bundle))

    try:
        trace = VirtualWorld(cluster, spec.workers, acting=(0, spec.workers - 1)).run(program).trace
    except Asymmetric:
        return False
    return [event.op for event in trace.events if event.rank == 0] == ["compute", "all_reduce"]
