"""How many floating-point operations a sample costs: what a virtual world charges."""

from __future__ import annotations

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polytempo.data.shard import DataShard
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import next_batch
from polytempo.spec.objective import loss_of
from polytempo.training.step.job_profile import untouched

_SAMPLES = 2


def flops_per_sample(job: Job, model: nn.Module, data: Data, seed: int) -> float:
    """Forward and backward of one sample, counted from a batch of two. Leaves no gradient, and buffers as they are.

    Counts matrix products, convolutions and attention; where a model has none of them, two operations
    for each parameter forward and four backward. Of ragged samples it is the cost of the two that come first.
    """
    shard = DataShard(data.training(), rank=0, size=1, batch_size=_SAMPLES, seed=seed)
    batch = next_batch(job, iter(shard))
    with untouched(model), FlopCounterMode(display=False) as counter:
        loss_of(job, model, batch).backward()
    counted = counter.get_total_flops() / shard.batch_samples
    return counted or 6.0 * sum(parameter.numel() for parameter in model.parameters())
