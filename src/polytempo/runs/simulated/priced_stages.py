"""`priced_stages`: a run of a cut model in the virtual world that computes nothing and takes its time."""

from __future__ import annotations

from typing import Any, NamedTuple

from polytempo.cluster import Cluster
from polytempo.core import Port
from polytempo.core.port import world_port
from polytempo.spec.job import Data
from polytempo.spec.job_calls import optimizer_of, replica_of
from polytempo.spec.objective import pair_loss
from polytempo.spec.run_spec import RunSpec
from polytempo.training.parts.staged_training import cut_of, first_batch
from polytempo.training.pipeline.micro_batches import MicroBatches
from polytempo.training.pipeline.pipeline_stage import laid_out, schedule_of
from polytempo.training.pipeline.priced_stage import PricedStage, on_meta
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.step.step_cost import flops_per_sample
from polytempo.worlds import Outcome, VirtualWorld


class PricedStages(NamedTuple):
    """What came of it."""

    outcome: Outcome[None]
    stages: list[PricedStage]
    """Of each rank."""


def priced_stages(spec: RunSpec, cluster: Cluster, data: Data, steps: int) -> PricedStages:
    """So many steps of `spec`, each on a batch as large as the first one.

    Memory: the model once, and tensors without values of each rank. Errors: ValueError as of `cut_of`.
    """
    job, strategy, schedule = spec.job, spec.strategy, schedule_of(spec.strategy)
    model, _ = replica_of(spec)
    parts = cut_of(spec, model, data)
    size = -(-(spec.options.global_batch_size or 0) // spec.replicas) or spec.batch_size
    inputs, target = first_batch(job, data, size, spec.seed)
    flops = flops_per_sample(job, model, data, spec.seed)
    batch = MicroBatches(parts, schedule, pair_loss(job), spec.seed, 0, flops).of((inputs,), target, 0)
    priced = on_meta(parts)
    models = [StageModel(priced.stages[number :: schedule.stages]) for number in range(schedule.stages)]
    optimizers = [optimizer_of(job, each, lr=spec.lr) for each in models]

    def stage(port: Port) -> PricedStage:
        whole = laid_out(port, schedule.stages)
        number = whole.rank % schedule.stages
        return PricedStage(priced, models[number], optimizers[number], strategy, whole, batch)

    hosts = cluster.hosts(spec.workers)
    stages = [stage(world_port(rank, hosts)) for rank in range(spec.workers)]

    async def program(port: Port) -> Any:
        for step in range(steps):
            await port.mark(step)
            await stages[port.rank].step()
        await stages[port.rank].finish()
        await port.barrier()  # as where it computes: waiting for the slowest is training time

    return PricedStages(VirtualWorld(cluster, spec.workers, seed=spec.seed).run(program), stages)
