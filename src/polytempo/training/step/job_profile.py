"""A profile of a job's operators in forward and backward: launches, bytes, operations, and seconds.

One batch runs under a dispatch mode, which sees each operator that torch performs, in the backward pass, too. Counted
are the bytes of tensors that an operator reads and writes, and the operations of products, convolutions and attention
(`torch.utils.flop_counter`). A view costs a launch and no bytes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from polytempo.core.arithmetic.kernel_use import KernelUse, Uses, together
from polytempo.data.shard import DataShard
from polytempo.device import random_states, set_random_states
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import next_batch
from polytempo.spec.objective import loss_of
from polytempo.training.model.run_device import beside, device_of, synchronize

Pass = Literal["forward", "backward"]


class OperatorCost(NamedTuple):
    """All calls of one operator in one pass."""

    operator: str
    """Torch's name: `aten.mm`."""
    use: KernelUse
    seconds: float
    """Measured on this machine with one batch; the median of several."""


class JobProfile(NamedTuple):
    """The profile of a batch of `samples` samples."""

    samples: int
    forward: tuple[OperatorCost, ...]
    backward: tuple[OperatorCost, ...]
    saved_bytes: int
    """Bytes of activations: the forward pass keeps them for the backward pass. Without parameters."""
    seconds: float
    """Seconds of forward and backward together, without the profiler's overhead; the median of several."""

    def uses(self, which: Pass, samples: float) -> Uses:
        """Kernel uses of a pass over `samples` samples: bytes and operations grow with the samples, launches do not."""
        share = samples / self.samples
        found = together(each.use for each in (self.forward if which == "forward" else self.backward))
        return tuple(use._replace(num_bytes=use.num_bytes * share, flops=use.flops * share) for use in found)


def profiled(job: Job, model: nn.Module, data: Data, seed: int, batch_size: int, repeats: int = 1) -> JobProfile:
    """Profile one batch, so many times. Leaves gradients, buffers and the state of the random numbers as they are."""
    shard = DataShard(data.training(), rank=0, size=1, batch_size=batch_size, seed=seed)
    device = device_of(model)
    batch = beside(model, next_batch(job, iter(shard)))

    def clock() -> float:
        """Seconds when all that was begun is over."""
        synchronize(device)
        return time.perf_counter()

    runs: list[tuple[Operators, Operators]] = []
    plain_s, saved = [], 0
    with untouched(model):
        for _ in range(repeats):
            forward, backward, kept = Operators(clock), Operators(clock), _Saved(model)
            with kept.watch(), forward:
                loss = loss_of(job, model, batch)
            with backward:
                loss.backward()
            runs.append((forward, backward))
            saved = kept.num_bytes
            begin_s = clock()
            model.zero_grad()
            loss_of(job, model, batch).backward()
            plain_s.append(clock() - begin_s)
    return JobProfile(
        shard.batch_samples,
        _costs([forward for forward, _ in runs]),
        _costs([backward for _, backward in runs]),
        saved,
        median(plain_s),
    )


@contextmanager
def untouched(model: nn.Module) -> Generator[None]:
    """Gradients, buffers and the state of torch's random numbers are afterwards as they were."""
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = random_states()
    try:
        yield
    finally:
        set_random_states(state)
        with torch.no_grad():
            for buffer, kept in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(kept)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient


class Operators(TorchDispatchMode):
    """Counts operators in torch's dispatcher, timed by `clock`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._clock = clock
        self.calls: list[tuple[str, KernelUse, float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        begin_s = self._clock()
        out = func(*args, **(kwargs or {}))
        seconds = self._clock() - begin_s
        name = f"aten.{func.overloadpacket.__name__}"
        self.calls.append((name, _use(func, args, kwargs or {}, out), seconds))
        return out


def _use(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> KernelUse:
    if getattr(func, "is_view", False):
        return KernelUse("view")
    tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
    num_bytes = float(sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided))
    count: Callable[..., Any] | None = flop_registry.get(func.overloadpacket)
    if count is None:
        return KernelUse("elementwise", 1, num_bytes)
    return KernelUse(_kind(func.overloadpacket.__name__), 1, num_bytes, float(count(*args, **kwargs, out_val=out)))


def _kind(operator: str) -> str:
    if "conv" in operator:
        return "convolution"
    return "attention" if "attention" in operator else "product"


class _Saved:
    """Adds up the tensors that autograd keeps between forward and backward, each storage once, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._found: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._found.values())

    def watch(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context that sees all kept tensors."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._found[storage.data_ptr()] = storage.nbytes()
        return tensor


def _costs(runs: list[Operators]) -> tuple[OperatorCost, ...]:
    """The calls of the first run by operator, each with the median time of all runs that made the same calls."""
    found: dict[tuple[str, str], list[tuple[KernelUse, float]]] = defaultdict(list)
    alike = [run for run in runs if len(run.calls) == len(runs[0].calls)]
    for i, (name, use, _) in enumerate(runs[0].calls):
        found[name, use.kernel].append((use, median(run.calls[i][2] for run in alike)))
    return tuple(
        OperatorCost(name, together(use for use, _ in calls)[0], sum(seconds for _, seconds in calls))
        for (name, _), calls in found.items()
    )
