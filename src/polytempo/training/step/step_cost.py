"""`StepCost`: the charge of a virtual world for a training step: one number, or kernel uses.

step · forward │ backward of bucket 0, its check and scaling │ … of bucket 1 │ update · check
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from polytempo.cluster import Cluster
from polytempo.cluster.computing_time import EXCHANGE, SERVER_EXCHANGE, SERVER_STEP
from polytempo.core import Bundle
from polytempo.core.arithmetic.kernel_use import KernelUse, Uses, together
from polytempo.core.state import residual_tensors
from polytempo.data.shard import DataShard
from polytempo.partition.graph.profile import attention_flops
from polytempo.spec.explanation import explain as explained
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import model_of, next_batch
from polytempo.spec.objective import loss_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.start import replica_of
from polytempo.training.model.host_copies import copies_of_step
from polytempo.training.model.run_device import beside
from polytempo.training.step.bucket import Bucket
from polytempo.training.step.job_profile import JobProfile, Pass, profiled, untouched
from polytempo.training.step.replica import Replica


class StepUses(NamedTuple):
    """Kernel uses of the parts of a step; empty for a cluster without measured kernels."""

    forward: Uses = ()
    backward: tuple[Uses, ...] = ()
    """One entry for each bucket; a single one without buckets."""
    update: Uses = ()

    @property
    def whole(self) -> Uses:
        """Forward and backward of all buckets."""
        return together([*self.forward, *(use for each in self.backward for use in each)])


class StepCost(NamedTuple):
    """The cost of a job's step. `profile` None: `flops_per_sample` is all that counts."""

    flops_per_sample: float
    profile: JobProfile | None = None
    checks: bool = True
    """True if gradients are checked before their exchange (a run without `allow_nan`)."""
    pace: float = 1.0
    """Factor between a step's time and the sum of its kernels' times, exchanges left out."""
    parameters: tuple[int, int] = (0, 0)
    """Number of trained tensors, and their bytes."""
    served: tuple[float, float] = (1.0, 1.0)
    """Pushes and pulls for each step, where a parameter server takes the gradients."""
    copied: Uses = ()
    """Kernel uses of the copies of a step between a device and the host."""
    done: Mapping[str, float] = MappingProxyType({})
    """The part of the backward pass's operations that is over when a parameter has its gradient, by name."""

    def shares(self, replica: Replica) -> tuple[float, ...]:
        """The part of the backward pass before each bucket's exchange: by operations, or by sizes where `done` has not
        all parameters."""
        buckets = replica.buckets
        if len(buckets) < 2 or any(name not in self.done for bucket in buckets for name in bucket.parameters):
            return tuple(bucket.numel / replica.numel for bucket in buckets)
        found, over = [], 0.0
        for number, bucket in enumerate(buckets, 1):
            now = 1.0 if number == len(buckets) else max(over, *(self.done[name] for name in bucket.parameters))
            found.append(now - over)
            over = now
        return tuple(found)

    def part(self, ranks: int) -> StepCost:
        """The cost of one of so many ranks that share a model's layers. Kernels are measured of whole layers."""
        return StepCost(self.flops_per_sample / ranks, done=self.done)

    def uses(self, replica: Replica, passes: Sequence[float], factor: float = 1.0) -> StepUses:
        """Kernel uses of a step of `replica` in passes over so many samples, times `factor`.

        All passes but the last are part of `forward`.
        """
        if self.profile is None:
            return StepUses()
        *earlier, samples = passes
        back = self._pass(self.profile, "backward", samples)
        parts = [
            together([*(use.times(share) for use in back), *self._exchanged(bucket), *self._copied(bucket, replica)])
            for share, bucket in zip(self.shares(replica), replica.buckets, strict=True)
        ]
        if not parts:  # a look for NaN in gradients, or in exchanged parameters
            tensors = list(replica.trainable.values())
            check = self._paced([KernelUse("check", len(tensors), _num_bytes(tensors))]) if self.checks else ()
            parts = [together([*back, *check, *self.copied])]
        before = [use for each in earlier for use in self._passes(self.profile, each)]
        forward = [*self._paced(_batch(sum(passes))), *before, *self._pass(self.profile, "forward", samples)]
        forward = list(together(forward)) if before else forward
        return StepUses(
            tuple(use.times(factor) for use in forward),
            tuple(tuple(use.times(factor) for use in part) for part in parts),
            self._paced([update_use(replica.optimizer)]),
        )

    def gradients(self, passes: Sequence[float]) -> Uses:
        """Kernel uses of forward and backward in passes over so many samples, for gradients that servers take.

        A worker also looks for NaN in the gradients and packs them. A push copies them; a pull copies the parameters
        twice, the second time to their places.
        """
        if self.profile is None:
            return ()
        computed = [use for each in passes for use in self._passes(self.profile, each)]
        tensors, num_bytes = self.parameters
        check = [KernelUse("check", tensors, num_bytes)] if self.checks else []
        own = self._paced([*_batch(sum(passes)), *check])
        pushes, pulls = self.served
        served = [
            KernelUse(SERVER_STEP),
            KernelUse("scale", tensors, num_bytes),
            KernelUse("copy", 1, num_bytes).times(pushes),
            KernelUse("copy", 1 + tensors, 2 * num_bytes).times(pulls),
            KernelUse(SERVER_EXCHANGE, 1, num_bytes).times((pushes + pulls) / 2),
        ]
        return together([*own, *computed, *served, *self.copied])

    def _pass(self, profile: JobProfile, which: Pass, samples: float) -> Uses:
        return self._paced(profile.uses(which, samples))

    def _passes(self, profile: JobProfile, samples: float) -> Iterator[KernelUse]:
        """Forward and backward."""
        for which in get_args(Pass):
            yield from self._pass(profile, which, samples)

    def _paced(self, uses: Iterable[KernelUse]) -> Uses:
        return tuple(use.times(self.pace) for use in uses)

    def _copied(self, bucket: Bucket, replica: Replica) -> Uses:
        return tuple(use.times(bucket.numel / replica.numel) for use in self.copied)

    def _exchanged(self, bucket: Bucket) -> Uses:
        """Kernel uses of a bucket: the look for NaN, packing and scaling, copies of residuals, and the exchange's
        overhead."""
        tensors = list(bucket.parameters.values())
        num_bytes = _num_bytes(tensors)
        check = self._paced([KernelUse("check", len(tensors), num_bytes)]) if self.checks else ()
        residuals = list(residual_tensors(bucket.state))
        kept = [KernelUse("copy", len(residuals), _num_bytes(residuals))] if residuals else []
        return (*check, KernelUse("scale", len(tensors), num_bytes), *kept, KernelUse(EXCHANGE, 1, num_bytes))


def step_cost(spec: RunSpec, model: nn.Module, data: Data, cluster: Cluster) -> StepCost:
    """Counted from a batch of two, and profiled with a batch of the run where the cluster's kernels were measured."""
    flops, done = counted(spec.job, model, data, spec.seed)
    if cluster.speeds is None:
        return StepCost(flops, done=done)
    profile = profiled(spec.job, model, data, spec.seed, spec.batch_size)
    pace = cluster.speeds.pace(spec.job.name, sum(p.numel() for p in model.parameters()), spec.workers)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    size = len(trained), _num_bytes(trained.values())
    served = _served(spec, Bundle(trained))
    copied = _copies(spec, model, cluster) if cluster.computes_on else ()
    return StepCost(flops, profile, not spec.options.allow_nan, pace, size, served, copied, done)


def cost_without_values(spec: RunSpec, data: Data, cluster: Cluster) -> StepCost:
    """`step_cost` of a run that computes nothing.

    Memory: none, the job's model is made on the meta device. The model itself, where the cluster's kernels were
    measured, or where the job cannot be computed without values.
    """
    if cluster.speeds is None:
        try:
            return step_cost(spec, meta_model(spec.job), data, cluster)
        except (RuntimeError, TypeError, ValueError):
            """An error of the job itself comes with values, too."""
    return step_cost(spec, replica_of(spec)[0], data, cluster)


def meta_model(job: Job) -> nn.Module:
    """The job's model with sizes alone."""
    with torch.device("meta"):
        return model_of(job).to("meta")


def _copies(spec: RunSpec, model: nn.Module, cluster: Cluster) -> Uses:
    """The copies of a step on a device. None are known of a transform that names no cost."""
    try:
        found = explained(spec.strategy, spec.workers, model)
    except ValueError:
        return ()
    exchanges = [planned.exchange for planned in found.exchanges]
    return copies_of_step(exchanges, spec.workers, staged=cluster.staged(spec.workers))


def _served(spec: RunSpec, parameters: Bundle) -> tuple[float, float]:
    """Pushes and pulls for each step; one of each where a transform does not say."""
    found = {"push": 0.0, "pull": 0.0}
    for transform in (spec.strategy.gradients, spec.strategy.parameters):
        if transform.cost is None:
            return 1.0, 1.0
        for exchange in transform.cost(parameters, spec.workers).exchanges:
            if exchange.server:
                found[exchange.server] += 1 / exchange.steps.period
    return found["push"], found["pull"]


def update_use(optimizer: Optimizer) -> KernelUse:
    """An optimizer's step: `update SGD momentum`, with the bytes of its parameters and a call for each."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    return KernelUse(f"update {optimizer_kind(optimizer)}", len(tensors), _num_bytes(tensors))


def optimizer_kind(optimizer: Optimizer) -> str:
    """The optimizer's class, and its momentum and weight decay."""
    group = optimizer.param_groups[0]
    extras = [key for key in ("momentum", "weight_decay") if group.get(key)]
    return " ".join([type(optimizer).__name__, *extras])


def _batch(samples: float) -> Uses:
    """Kernel uses of a step's overhead, and of making its batch."""
    return (KernelUse("step"), KernelUse("sample", samples))


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class OperationCount(NamedTuple):
    """The operations of a job."""

    flops_per_sample: float
    """Forward and backward of one sample."""
    done: Mapping[str, float]
    """`StepCost.done`; empty for a model without counted operations."""


_SAMPLES = 2
_PRODUCTS = 4
"""Matrix products of attention's backward pass, without the second computation of scores that a kernel did not keep."""


def counted(job: Job, model: nn.Module, data: Data, seed: int) -> OperationCount:
    """Count the operations of a batch of two, on the model's device. Leaves no gradient, and buffers as they are.

    Counted are matrix products, convolutions and attention, the same on each device, "meta" too. A model that has none
    of them gets two operations for each parameter forward, and four backward. Of ragged samples it is the cost of the
    two that come first. A gradient's part of the backward pass is noted when autograd adds it to its parameter.
    """
    shard = DataShard(data.training(), rank=0, size=1, batch_size=_SAMPLES, seed=seed)
    batch = beside(model, next_batch(job, iter(shard)))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    there: dict[str, int] = {}

    def note(name: str, _: Tensor) -> None:
        there[name] = counter.get_total_flops()

    with untouched(model), FlopCounterMode(display=False, custom_mapping=attention_flops(_PRODUCTS)) as counter:
        loss = loss_of(job, model, batch)
        forward = counter.get_total_flops()
        hooks = [p.register_post_accumulate_grad_hook(partial(note, name)) for name, p in trained.items()]
        try:
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        total = counter.get_total_flops()
    if not total:
        return OperationCount(6.0 * sum(parameter.numel() for parameter in model.parameters()), {})
    backward = total - forward
    done = {name: (there.get(name, total) - forward) / backward for name in trained} if backward else {}
    return OperationCount(total / shard.batch_samples, done)
