"""A job with a model in stages: one rank's stage, its step, and checks of the job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from polytempo.core import Port
from polytempo.core.calls.refusals import refuse
from polytempo.data.shard import DataShard
from polytempo.partition.cut import Cut
from polytempo.partition.cutting import cut
from polytempo.partition.schedules.facts import steps_late
from polytempo.spec.job import Data, Job, OfBatch
from polytempo.spec.job_calls import next_batch, optimizer_of
from polytempo.spec.objective import pair_loss, pair_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.context import TakeStep
from polytempo.training.job.growth import Pieces
from polytempo.training.model.randomness import kept_random_states, seed_step
from polytempo.training.model.run_device import beside
from polytempo.training.pipeline.pipeline_stage import PipelineStage, schedule_of


def staged(
    spec: RunSpec, model: nn.Module, parts: Cut, port: Port, flops_per_sample: float = 0.0, series: int = 0
) -> PipelineStage:
    """The stage of the job's `model` that the rank of `port`, which is laid out, has. Sends nothing.

    `series`: its number among the models that a world trains.
    """
    return PipelineStage(
        model,
        parts,
        partial(optimizer_of, spec.job, lr=spec.lr),
        pair_loss(spec.job),
        spec.strategy,
        port,
        seed=spec.seed,
        allow_nan=spec.options.allow_nan,
        flops_per_sample=flops_per_sample,
        precision=spec.options.precision,
        max_norm=spec.options.clip_norm,
        series=series,
    )


def staged_step(stage: PipelineStage, job: Job) -> TakeStep:
    """A step of the pipeline on one batch. The first stage answers the loss of the batch that is back."""

    async def take_step(port: Port, batch: Any, samples: int, share: float | None) -> Tensor | None:
        inputs, target = pair_of(job, batch.pieces[0].batch if isinstance(batch, Pieces) else batch)
        return await stage.reported(await stage.step((inputs,), target, share))

    return take_step


def cut_of(spec: RunSpec, model: nn.Module, data: Data, begins: Sequence[str] | None = None) -> Cut:
    """The job's model in the strategy's stages, of about as many operations each; the same on all ranks.

    `begins`: the names that stages but the first begin at, if they are known.

    Errors: ValueError for a job with a loss that calls the model itself, for a model that cannot be cut, or not in so
    many stages, and for weights that several stages share in a late schedule. `Incompatible` for clipping in one.
    """
    schedule = schedule_of(spec.strategy)
    if spec.options.clip_norm is not None and steps_late(schedule):
        refuse({"clipping", "late stages"}, clip_norm=spec.options.clip_norm, strategy=spec.strategy)
    sample = beside(model, sample_of(spec.job, data, spec.batch_size, spec.seed))
    return cut(model, schedule.stages * schedule.parts, sample=sample, by="operations" if begins is None else begins)


def sample_of(job: Job, data: Data, batch_size: int, seed: int = 0) -> tuple[Any]:
    """The input of a batch, for a call of the job's model."""
    return (first_batch(job, data, batch_size, seed)[0],)


def first_batch(job: Job, data: Data, batch_size: int, seed: int = 0) -> tuple[Any, Any]:
    """Input and target of one."""
    if isinstance(job.loss, OfBatch):
        raise ValueError(
            f"job {job.name}: its loss is called with the model and the whole batch, which hides the model's own "
            "arguments; a model can be cut where a batch is a pair (input, target): write the loss as "
            "loss(output, target), without pt.of_batch"
        )
    with kept_random_states():
        seed_step(seed, 0, 0, "the sample that a model is cut with")
        shard = DataShard(data.training(), rank=0, size=1, batch_size=batch_size, seed=seed)
        inputs, target = pair_of(job, next_batch(job, iter(shard)))
        return inputs, target
