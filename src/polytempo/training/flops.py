"""How many floating-point operations a sample costs: what a virtual world charges."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polytempo.data.shard import DataShard
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import next_batch
from polytempo.spec.objective import loss_of

_SAMPLES = 2


def flops_per_sample(job: Job, model: nn.Module, data: Data, seed: int) -> float:
    """Forward and backward of one sample, counted from a batch of two. Leaves no gradient, and buffers as they are.

    Counts matrix products, convolutions and attention; where a model has none of them, two operations
    for each parameter forward and four backward. Of ragged samples it is the cost of the two that come first.
    """
    shard = DataShard(data.training(), rank=0, size=1, batch_size=_SAMPLES, seed=seed)
    batch = next_batch(job, iter(shard))
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    with FlopCounterMode(display=False) as counter:
        loss_of(job, model, batch).backward()
    torch.set_rng_state(state)
    for buffer, kept in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(kept)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    counted = counter.get_total_flops() / shard.batch_samples
    return counted or 6.0 * sum(parameter.numel() for parameter in model.parameters())
