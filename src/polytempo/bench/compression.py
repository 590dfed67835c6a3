"""`bench compression`: does it pay? Codecs are timed on this machine, and the network is computed.

A step of a codec costs its computing, c seconds, and b bytes one behind the other over a link of B bytes a second in r
rounds of latency α; an uncompressed step b₀ bytes in r₀ rounds (the ring), and c₀ for packing and scaling:

    T(B) = c + r·α + b/B          T₀(B) = c₀ + r₀·α + b₀/B          T < T₀  ⟺  B < (b₀ - b) / (c + r·α - c₀ - r₀·α)

c is measured: all computing of rank 0's side of the transform, from encoding to decoding the messages of the others.
b and r are the virtual world's charges for the transform's own operations, so the prices are the prices of
`collectives`, and `through` has chosen the way. Computing and sending do not overlap here. With a cluster of measured
kernels c is the time of these kernels, and nothing is measured here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

from polytempo.bench.machine import memory_bytes, written
from polytempo.cluster import Cluster, Link
from polytempo.compression.exchange.packing import EXACT_BELOW
from polytempo.core import ALONE, Bundle, Codec, Op, Port, Program, Transform, interpreted
from polytempo.core.arithmetic.kernel_use import KernelUse, Uses, together
from polytempo.core.op import Compute, T
from polytempo.strategies import sync_sgd
from polytempo.worlds import VirtualWorld

_MAX_WORKERS = 64
_COPIES = 8
"""Copies of the model that a rank holds at most: gradients, residuals, sums, wires."""
_BATCH = 32


class Candidate(NamedTuple):
    """A transform of gradients, and the codec in it, if it is one."""

    name: str
    transform: Transform
    codec: Codec | None = None


class CompressionPlan(NamedTuple):
    """The plan of the benchmark. `sizes`: a perceptron's layers. `link`: of each host. `steps` are measured."""

    sizes: Sequence[int]
    link: Link
    workers: int
    candidates: Sequence[Candidate]
    steps: int
    cluster: Cluster | None = None
    """The cluster with the kernels; None: this machine is measured."""


class Costs(NamedTuple):
    """One step of one rank: seconds of computing, bytes one behind the other on the link, rounds of latency."""

    computing_s: float
    serial_bytes: float
    rounds: float
    sent_bytes: float
    """Bytes from rank 0 to all ranks, as a trace counts them."""
    way: str

    def communication_s(self, link: Link) -> float:
        """r·α + b/B."""
        return self.rounds * link.latency_s + self.serial_bytes / link.bytes_per_s

    def step_s(self, link: Link) -> float:
        """c + r·α + b/B."""
        return self.computing_s + self.communication_s(link)


def compression(plan: CompressionPlan) -> dict[str, Any]:
    """Measure; the result as `written` lays it out.

    A row: codec, way, sent_bytes and ratio (uncompressed / sent), encode_s and decode_s (of all tensors that are
    encoded; None without a codec), computing_s, serial_bytes, rounds, communication_s, step_s, uncompressed_s, and
    wins_below_bytes_per_s (None: at no speed; "any": at all). Errors: ValueError for an impossible plan.
    """
    check(plan)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gradients = [gradient_of(plan.sizes, rank) for rank in range(plan.workers)]
        plain = costs(sync_sgd().gradients, gradients, plan.steps, plan.cluster)
        rows = [_row(each, plain, gradients, plan) for each in plan.candidates]
    finally:
        torch.set_num_threads(threads)
    settings = {
        "model": "-".join(map(str, plan.sizes)),
        "parameters": sum(t.numel() for t in gradients[0].values()),
        "workers": plan.workers,
        "bytes_per_s": plan.link.bytes_per_s,
        "latency_s": plan.link.latency_s,
        "steps": plan.steps,
        "cluster": None if plan.cluster is None else plan.cluster.name,
        "uncompressed": _written(plain, plan.link),
    }
    return written("compression", settings, {}, rows)


def check(plan: CompressionPlan) -> None:
    """Refuse an impossible plan."""
    if len(plan.sizes) < 2 or min(plan.sizes) < 1:
        raise ValueError("--model: at least two layers of at least one unit, such as 784-2048-10")
    if not 2 <= plan.workers <= _MAX_WORKERS:
        raise ValueError(f"--workers {plan.workers}: from 2 to {_MAX_WORKERS}; one worker has no other to send to")
    if plan.cluster is not None and plan.cluster.speeds is None:
        raise ValueError(
            f"--cluster: {plan.cluster.name} has one speed for everything; write a file with `polytempo calibrate`"
        )
    if not plan.candidates:
        raise ValueError("--codecs: name at least one")
    parameters = sum((a + 1) * b for a, b in pairwise(plan.sizes))
    needed, there = plan.workers * parameters * 4 * _COPIES, memory_bytes("MemAvailable")
    if there is not None and needed > there:
        raise ValueError(
            f"all {plan.workers} workers are played by this process, and their {parameters:,} parameters need about "
            f"{needed / 2**30:.1f} GiB; {there / 2**30:.1f} GiB are free: ask for fewer workers or a smaller model"
        )


def wins_below(coded: Costs, plain: Costs, latency_s: float) -> float | None:
    """Bytes a second below which `coded` is faster than `plain`; inf: always; None: never."""
    saved_bytes = plain.serial_bytes - coded.serial_bytes
    lost_s = coded.computing_s - plain.computing_s + (coded.rounds - plain.rounds) * latency_s
    if saved_bytes <= 0:
        return None
    return inf if lost_s <= 0 else saved_bytes / lost_s


def gradient_of(sizes: Sequence[int], rank: int) -> dict[str, Tensor]:
    """A gradient of a perceptron of these layers: of cross-entropy on a random batch, another one for each rank."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    torch.manual_seed(1 + rank)
    loss = functional.cross_entropy(model(torch.randn(_BATCH, sizes[0])), torch.randint(sizes[-1], (_BATCH,)))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -------------------------------------------------------------------------------------------- a step of a transform


class _Watch:
    """Seconds that a rank's side of a step has computed: it stands still while the rank waits for an operation."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.uses: list[KernelUse] = []
        """Computations so far."""
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None


async def _watched(program: Program[Any], watch: _Watch) -> Any:
    """The program with its computing timed, and charged nothing by the virtual clock."""

    async def perform(op: Op[Any]) -> Any:
        watch.stop()
        try:
            if isinstance(op, Compute):
                watch.uses += op.uses
                return await replace(op, work=partial(_timed, watch, op.work), flops=0.0)
            return await op
        finally:
            watch.start()

    watch.start()
    try:
        return await interpreted(program, perform)
    finally:
        watch.stop()


def _timed(watch: _Watch, work: Callable[[], T]) -> T:
    watch.start()
    try:
        return work()
    finally:
        watch.stop()


def costs(
    transform: Transform, gradients: Sequence[dict[str, Tensor]], steps: int, cluster: Cluster | None = None
) -> Costs:
    """Costs of a step of `transform` for a rank: the median of so many steps' computing, after a step to warm up.

    Bytes are of the last step: until then a codec may adapt to the gradients. With `cluster` its kernels say how long
    the last step computes.
    """
    taken, world = _played(transform, gradients, 1 + steps, Link(0.0, 1.0))
    (first,), _ = _played(transform, gradients, 1, Link(1.0, inf))
    ops = dict.fromkeys(e.op for e in world.trace.events if e.rank == 0 and e.op not in ("compute", "barrier"))
    way = ", ".join(op.replace("_", "-") for op in ops)
    computing_s = statistics.median(step.computing_s for step in taken[1:])
    if cluster is not None:
        computing_s = cluster.computing_s(0.0, together([*_packed(gradients[0]), *taken[-1].uses]))
    return Costs(computing_s, taken[-1].passed_s, first.passed_s, taken[-1].sent_bytes, way)


class _Step(NamedTuple):
    """One step of rank 0: seconds of computing, virtual seconds until it was over, bytes to all ranks, kernels."""

    computing_s: float
    passed_s: float
    sent_bytes: int
    uses: Uses


def _packed(gradients: dict[str, Tensor]) -> Uses:
    """Work before a transform: to pack and to scale."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in gradients.values())
    return (KernelUse("scale", len(gradients), num_bytes),)


def _played(
    transform: Transform, gradients: Sequence[dict[str, Tensor]], steps: int, link: Link
) -> tuple[list[_Step], VirtualWorld]:
    """Rank 0's steps, and their world."""
    world = VirtualWorld(Cluster(network=link), len(gradients))
    taken: list[_Step] = []

    async def program(port: Port) -> None:
        own = gradients[port.rank]
        state = transform.init(Bundle(own))
        for _ in range(steps):
            bundle = Bundle({name: t.clone() for name, t in own.items()})
            begun_s, sent_bytes = await port.now(), world.trace.bytes_sent[port.rank]
            watch = _Watch()
            _, state = await _watched(transform.apply(port, bundle, state), watch)
            if port.rank == 0:
                passed_s = await port.now() - begun_s
                sent = world.trace.bytes_sent[port.rank] - sent_bytes
                taken.append(_Step(watch.seconds, passed_s, sent, tuple(watch.uses)))
            await port.barrier()

    world.run(program)
    return taken, world


# ---------------------------------------------------------------------------------------------------- the codec alone


def codec_seconds(codec: Codec, gradient: dict[str, Tensor], calls: int) -> tuple[float, float]:
    """Seconds to encode, and to decode and add, all tensors that are encoded: medians."""
    tensors = [t for t in gradient.values() if t.numel() >= EXACT_BELOW]
    states = [codec.init(t) for t in tensors]
    outs = [torch.zeros_like(t) for t in tensors]
    rooms = [torch.zeros(codec.wire_bytes(t), dtype=torch.uint8).view(codec.wire_dtype(t)) for t in tensors]
    encoding, decoding = [], []
    for call in range(calls + 1):
        when = ALONE._replace(step=1 + call)
        begun = time.perf_counter()
        found = [codec.encode(t, s, when, room) for t, s, room in zip(tensors, states, rooms, strict=True)]
        encoded = time.perf_counter()
        for (wire, _), out in zip(found, outs, strict=True):
            codec.add_(wire, out, when)
        encoding.append(encoded - begun)
        decoding.append(time.perf_counter() - encoded)
        states = [state for _, state in found]  # of a codec with feedback: the same memory, in place
    return statistics.median(encoding[1:]), statistics.median(decoding[1:])


# ------------------------------------------------------------------------------------------------------------ results


def _row(
    candidate: Candidate, plain: Costs, gradients: Sequence[dict[str, Tensor]], plan: CompressionPlan
) -> dict[str, Any]:
    found = costs(candidate.transform, gradients, plan.steps, plan.cluster)
    encode_s, decode_s = (None, None)
    if candidate.codec is not None and plan.cluster is None:
        encode_s, decode_s = codec_seconds(candidate.codec, gradients[0], plan.steps)
    below = wins_below(found, plain, plan.link.latency_s)
    return {
        "codec": candidate.name,
        **_written(found, plan.link),
        "ratio": plain.sent_bytes / max(1.0, found.sent_bytes),
        "encode_s": encode_s,
        "decode_s": decode_s,
        "uncompressed_s": plain.step_s(plan.link),
        "wins_below_bytes_per_s": "any" if below == inf else below,
    }


def _written(found: Costs, link: Link) -> dict[str, Any]:
    named = found._asdict()
    return {**named, "communication_s": found.communication_s(link), "step_s": found.step_s(link)}
