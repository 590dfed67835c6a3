"""The memory of a worker: estimated from shapes and one batch, or measured in a process.

parameters + gradients + optimizer state + activations (or the temporary memory of the optimizer's step, if more)
+ the strategy's memory + the buffers that it exchanges
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polytempo.core import Bundle, is_idle
from polytempo.core.transform import cost_of
from polytempo.data.shard import DataShard
from polytempo.engines.local_engine import launch
from polytempo.partition.cut import Cut
from polytempo.partition.schedules.facts import facts
from polytempo.spec.job_calls import data_of, model_of, next_batch, optimizer_of
from polytempo.spec.objective import loss_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.pipeline.pipeline_stage import schedule_of
from polytempo.training.pipeline.priced_stage import on_meta
from polytempo.training.pipeline.stage_model import StageModel

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK = "5"
"""This text in `clear_refs` begins a new peak."""
_STEPS, _PATIENCE_S = 3, 120.0
_MMAP_THRESHOLD, _LARGE_BYTES = -3, 128 << 10
"""The option of mallopt(3), and glibc's first value of it."""


class WorkerMemory(NamedTuple):
    """Bytes of one worker."""

    parameters: int
    """Parameters and buffers, such as running statistics; of a stage, all its versions."""
    gradients: int
    optimizer: int
    """The optimizer's state after a step."""
    temporary: int
    """The temporary memory of the optimizer's step."""
    activations: int
    """Tensors that autograd keeps of one batch between forward and backward; of a stage, of micro-batches under way."""
    strategy: int
    """The state of the strategy's transforms."""
    exchanged: int
    """The flat buffers of gradients or parameters that travel."""

    @property
    def alone(self) -> int:
        """Bytes of a worker that exchanges nothing."""
        return self.parameters + self.gradients + self.optimizer + max(self.temporary, self.activations)

    @property
    def total(self) -> int:
        """All bytes; activations are gone when the optimizer's step begins."""
        return self.alone + self.strategy + self.exchanged


def estimated(spec: RunSpec, saved_bytes: int) -> WorkerMemory:
    """The memory of a worker with the whole model; `saved_bytes`: activations of one batch (`JobProfile.saved_bytes`).

    Nothing is computed: the model and a step of the optimizer are on the meta device.
    """
    with torch.device("meta"):
        model = model_of(spec.job)
    return _reckoned(spec, model, saved_bytes)


def estimated_stage(spec: RunSpec, parts: Cut) -> WorkerMemory:
    """The largest memory of a worker that has one stage of the job's model, cut in `parts` with a batch of the run.

    parameters x versions that passes under way use, plus saved bytes of a micro-batch x micro-batches under way

    A stage that recomputes keeps its inputs, and all of one micro-batch. Nothing is computed.
    """
    schedule, on_meta_device = schedule_of(spec.strategy), on_meta(parts)
    found = []
    for number in range(schedule.stages):
        needs, costs = facts(schedule, number), parts.costs[number :: schedule.stages]
        kept = max(cost.saved_bytes for cost in costs)
        held = kept * needs.held
        if schedule.recomputes:
            held = max(cost.bytes_in for cost in costs) * needs.held + kept
        model = StageModel(on_meta_device.stages[number :: schedule.stages])
        memory = _reckoned(spec, model, -(-held // schedule.micro_batches))
        older = (needs.versions - 1) * _bytes(model.parameters())
        found.append(memory._replace(parameters=memory.parameters + older))
    return max(found, key=lambda memory: memory.total)


def _reckoned(spec: RunSpec, model: nn.Module, saved_bytes: int) -> WorkerMemory:
    """`model`: the worker's part of the model, on the meta device."""
    with torch.device("meta"):
        optimizer = optimizer_of(spec.job, model, spec.lr)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        with _Live() as live:
            optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    strategy, replicas, bundle = spec.strategy, spec.replicas, Bundle({n: p.detach() for n, p in trained.items()})
    transforms = (strategy.gradients, strategy.parameters)
    exchanges = [transform for transform in transforms if replicas > 1 and not is_idle(transform, replicas)]
    return WorkerMemory(
        parameters=_bytes([*model.parameters(), *model.buffers()]),
        gradients=_bytes(trained.values()),
        optimizer=_bytes(states),
        temporary=live.most,
        activations=saved_bytes,
        strategy=sum(cost_of(transform, bundle, replicas).memory_bytes for transform in exchanges),
        exchanged=len(exchanges) * _bytes(trained.values()),
    )


class _Live(TorchDispatchMode):
    """Bytes of the tensors that operators have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Perform the operator, and count new tensors."""
        out = func(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in () if getattr(func, "is_view", False) else tree_leaves(out):
            if isinstance(leaf, Tensor) and id(leaf) not in given:
                self._add(leaf.nbytes)
                weakref.finalize(leaf, self._add, -leaf.nbytes)
        return out

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


def measured_bytes(spec: RunSpec) -> int | None:
    """The peak of a process that makes some steps alone, in bytes beyond its memory before the model was made.

    It counts pages, so memory that the allocator and torch's kernels keep is part of it. None if the kernel does not
    tell.
    """

    def work(rank_info: Any) -> int | None:
        _use_no_heap_for_tensors()
        return _measured(spec)

    [found] = launch(work, 1, threads=1, timeout_s=_PATIENCE_S)
    return None if found is None else int(found)


def _measured(spec: RunSpec) -> int | None:
    torch.manual_seed(spec.seed)
    data = data_of(spec.job, spec.options.data)
    shard = DataShard(data.training(), rank=0, size=1, batch_size=spec.batch_size, seed=spec.seed)
    batch = next_batch(spec.job, iter(shard))
    _warm()
    _give_back_what_is_free()
    before = _resident("VmRSS")
    if before is None or not _begin_peak():
        return None
    model = model_of(spec.job)
    optimizer = optimizer_of(spec.job, model, spec.lr)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss_of(spec.job, model, batch).backward()
        optimizer.step()
    peak = _resident("VmHWM")
    return None if peak is None else peak - before


def _use_no_heap_for_tensors() -> None:
    """Let glibc return large blocks to the system when they are freed.

    Otherwise it keeps blocks as large as the largest that was freed before, and the figure depends on the history of
    this process: a job of 1.08 times the estimate took 1.26 times after a tensor of 28 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def _warm() -> None:
    """Make one step, so that torch has loaded all that training loads."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


def _give_back_what_is_free() -> None:
    """Return free pages to the system: tensors in them would not make the process grow."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(key: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


def _begin_peak() -> bool:
    try:
        _CLEAR.write_text(_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
