"""Samples of a processor's seconds for the kernels of training.

operators     of models' forward and backward passes, one by one            product, convolution, elementwise, view
transforms    their computations in a virtual world of two ranks            encode …, decode …, low_rank …
around them   an update, packing and scaling, copying, looking for NaN      update …, scale, copy, check

Operators, and the work around them, are timed within steps of training: their inputs were written long before, and new
tensors have no memory yet, so they take up to five times as long as in repeated calls. All processes of a host measure
the same at the same time, so they share its memory as they do in training. Times are seconds of the thread on its
processor, so other programs take only caches and memory. On a device they are the clock's, up to the end of the work
there; a wait behind each operator would count launches that overlap in training, so operators are scaled to the whole
pass with one wait.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from polytempo.aggregation import low_rank
from polytempo.cluster import Cluster, Link
from polytempo.cluster.fit import Sample
from polytempo.compression import feedback, through
from polytempo.core import Bundle, Op, Port, Program, Transform, interpreted
from polytempo.core.arithmetic.kernel_use import KernelUse, Uses
from polytempo.core.op import Compute
from polytempo.device import HOST
from polytempo.spec.job_calls import move_model
from polytempo.spec.text.catalogue import NAMES
from polytempo.training.model.run_device import synchronize
from polytempo.training.step.guard import first_bad
from polytempo.training.step.job_profile import Operators
from polytempo.training.step.step_cost import update_use
from polytempo.worlds import VirtualWorld

_PERCEPTRONS = (
    ((64, 128, 10), 32),
    ((256, 256, 10), 8),
    ((256, 256, 256, 10), 128),
    ((512, 1536, 10), 16),
    ((512, 1536, 10), 64),
    ((1024, 1024, 512, 10), 32),
    ((2048, 1024, 10), 8),
)
"""Layers, and the size of a batch."""
_CONVOLUTIONS = (((1, 8, 16), 28, 16), ((3, 16, 32), 32, 8), ((16, 32), 16, 64))
"""Channels, the length of a picture's side, and the size of a batch."""
_REPEATS = 7
_SHAPES = ((48, 48), (256, 384), (768, 768))
"""Matrices to encode, two of each, so that both ranks own as much."""
_STEPS = 4
_OPTIMIZERS: tuple[Callable[[Any], Optimizer], ...] = (
    partial(torch.optim.SGD, lr=1e-3),
    partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    partial(torch.optim.SGD, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    partial(torch.optim.SGD, lr=1e-3, weight_decay=1e-4),
    partial(torch.optim.Adam, lr=1e-3),
    partial(torch.optim.AdamW, lr=1e-3, weight_decay=1e-2),
)


class MeasuredPlace(NamedTuple):
    """The place of the measured tensors, and a clock that stands where other programs run."""

    device: torch.device
    clock: Callable[[], float]


ON_HOST = MeasuredPlace(HOST, time.thread_time)


def on_device(device: torch.device) -> MeasuredPlace:
    """The device, with a clock that waits for its work."""

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    return MeasuredPlace(device, clock)


def operators(where: MeasuredPlace = ON_HOST) -> list[Sample]:
    """Samples of each operator call of some models' forward and backward passes; `operator` is torch's overhead."""
    found = [
        sample for sizes, batch in _PERCEPTRONS for sample in _passes(_perceptron(sizes), (batch, sizes[0]), where)
    ]
    for channels, side, batch in _CONVOLUTIONS:
        found += _passes(_convolutions(channels), (batch, channels[0], side, side), where)
    return found


def transforms(where: MeasuredPlace = ON_HOST) -> list[Sample]:
    """Samples of the computations of each codec's exchange, with feedback and without, and of `low_rank`."""
    made: list[Transform] = [low_rank(1), low_rank(2), low_rank(4)]
    for name in NAMES.codecs:
        if name == "feedback":
            continue
        for wrap in (lambda codec: codec, feedback):
            try:
                made.append(through(wrap(NAMES.codec(name)), exact_below=0))  # type: ignore[arg-type]
            except (TypeError, ValueError):
                continue  # it needs an argument, or keeps a memory of its own
    return [sample for transform in made for shape in _SHAPES for sample in _exchanges(transform, shape, where)]


def around(where: MeasuredPlace = ON_HOST) -> list[Sample]:
    """Samples of an optimizer's step, packing and scaling, copying, and a look for NaN, within steps of training."""
    return [
        sample
        for sizes, batch in _PERCEPTRONS
        for make in _OPTIMIZERS
        for sample in _around(_perceptron(sizes), make, (batch, sizes[0]), where)
    ]


# ---------------------------------------------------------------------- operators


def _perceptron(sizes: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _convolutions(channels: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels[-1], 10))


def _passes(model: nn.Module, shape: tuple[int, ...], where: MeasuredPlace) -> Iterator[Sample]:
    """Each operator call, its median of some steps; then the rest of a pass without a profiler."""
    move_model(model, where.device)
    inputs, target = torch.randn(shape).to(where.device), torch.randint(10, shape[:1]).to(where.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    runs, whole = [], []
    for step in range(2 * _REPEATS + 1):
        optimizer.zero_grad()
        begin_s = where.clock()
        with Operators(where.clock) if step % 2 else nullcontext() as run:
            functional.cross_entropy(model(inputs), target).backward()
        if run is not None:
            runs.append(run.calls)
        elif step:
            whole.append(where.clock() - begin_s)
        optimizer.step()
    whole_s = median(whole)
    medians = [median(run[i][2] for run in runs) for i in range(len(runs[0]))]
    overlap = 1.0 if where.device == HOST else min(1.0, whole_s / sum(medians))
    for (_, use, _), seconds in zip(runs[0], medians, strict=True):
        yield Sample((use,), overlap * seconds)
    rest_s = whole_s - sum(medians)
    yield Sample((KernelUse("operator", len(medians)),), max(rest_s, 0.0))


# ---------------------------------------------------------------------- transforms


def _exchanges(transform: Transform, shape: tuple[int, int], where: MeasuredPlace) -> list[Sample]:
    """Both ranks' computations in the steps after the first."""
    found: list[tuple[int, Sample]] = []

    async def program(port: Port) -> None:
        torch.manual_seed(port.rank)
        given = {name: (0.01 * torch.randn(shape)).to(where.device) for name in ("a", "b")}
        state = transform.init(Bundle(given))
        for step in range(_STEPS):
            bundle = Bundle({name: tensor.clone() for name, tensor in given.items()})
            take = partial(_noted, found, step)
            _, state = await _timed(transform.apply(port, bundle, state), take, where)
            await port.barrier()

    VirtualWorld(Cluster(network=Link(0.0, 1e12)), 2).run(program)
    return [sample for step, sample in found if step and sample.uses]


def _noted(found: list[tuple[int, Sample]], step: int, sample: Sample) -> None:
    found.append((step, sample))


async def _timed(program: Program[Any], take: Callable[[Sample], None], where: MeasuredPlace) -> Any:
    """The program, with the seconds of each of its computations."""

    async def perform(op: Op[Any]) -> Any:
        return await (replace(op, work=partial(_run, op.work, op.uses, take, where)) if isinstance(op, Compute) else op)

    return await interpreted(program, perform)


def _run(work: Callable[[], Any], uses: Uses, take: Callable[[Sample], None], where: MeasuredPlace) -> Any:
    _between(where.device).add_(1.0)
    begin_s = where.clock()
    value = work()
    take(Sample(uses, where.clock() - begin_s))
    return value


@cache
def _between(device: torch.device) -> Tensor:
    """Written before each computation of a transform, as a step of training writes gradients, weights and moments."""
    return torch.zeros(4 << 20, device=device)


# ---------------------------------------------------------------------- around them


def _around(
    model: nn.Module, make: Callable[[Any], Optimizer], shape: tuple[int, ...], where: MeasuredPlace
) -> Iterator[Sample]:
    move_model(model, where.device)
    inputs, target = torch.randn(shape).to(where.device), torch.randint(10, shape[:1]).to(where.device)
    named, optimizer = dict(model.named_parameters()), make(model.parameters())
    num_bytes = sum(p.numel() * p.element_size() for p in named.values())
    memory = Bundle(
        {name: p.detach() for name, p in named.items()},
        flat=torch.empty(sum(p.numel() for p in named.values()), device=where.device),
    )
    copies = [torch.empty_like(p) for p in named.values()]
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(_REPEATS + 1):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), target).backward()
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        work: dict[str, Callable[[], Any]] = {
            "check": lambda: first_bad(gradients.items()),  # noqa: B023
            "scale": lambda: Bundle(gradients, into=memory).scaled(0.5),  # noqa: B023
            "update": optimizer.step,
            "copy": lambda: torch._foreach_copy_(copies, [p.detach() for p in named.values()]),
        }
        for kernel, do in work.items():
            begin_s = where.clock()
            do()
            taken[kernel].append(where.clock() - begin_s)
    for kernel, seconds in taken.items():
        use = update_use(optimizer) if kernel == "update" else KernelUse(kernel, len(named), num_bytes)
        yield Sample((use,), median(seconds[1:]))
