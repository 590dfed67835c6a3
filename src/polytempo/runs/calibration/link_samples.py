"""Seconds of messages and collectives between the processes of a run, by the run's own routes.

one way      send n bytes; receive, copy to their place, answer a byte           latency and rate
both ways    send and receive n bytes at the same time, and copy                 the share of the rate in each direction
collectives  all_reduce, all_gather, all_to_all of all ranks, one after another  rates of the world's own collectives

The median of many times counts, as of steps: in training, too, ends of links wait for each other and for a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.cluster import Link
from polytempo.cluster.computing_time import COLLECTIVE
from polytempo.cluster.fit import Sample, fitted
from polytempo.core import Port
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.core.op import Collective, Op, Program
from polytempo.device import HOST
from polytempo.runs.calibration.probe import pairs_of
from polytempo.training.model.run_device import synchronize
from polytempo.worlds.collective import member_bytes, num_rounds

_SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 5 << 20)
_COLLECTIVE_SIZES = (8, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 5 << 20)
"""More, for a collective may cut messages of some sizes into segments."""
_LARGE = 2 << 20
_MESSAGES, _TRANSFERS, _FEWEST = 60, 15, 3
_MOST_S = 1.0
_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")


class LinkSample(NamedTuple):
    """The link from one rank to another, and the spread of its messages."""

    source: int
    target: int
    link: Link
    spread: float
    """(90th percentile - 10th percentile) / median of the largest messages."""

    def figures(self) -> tuple[int, int, float, float, float, float]:
        """The sample as plain numbers."""
        return (self.source, self.target, self.link.latency_s, self.link.bytes_per_s, self.link.duplex, self.spread)


async def links(port: Port) -> list[LinkSample]:
    """Every ordered pair of first ranks of hosts, and the first two ranks of each host, one pair at a time."""
    found = []
    for source, target in pairs_of(port.hosts):
        if port.rank in (source, target):
            found += [await _pair(port, source, target)] if port.rank == source else await _other(port, source, target)
        await port.barrier()
    return found


class CollectiveSamples(NamedTuple):
    """Samples of one kind of collective."""

    kind: str
    taken: list[tuple[int, float]]
    """Bytes of a rank's message, and seconds."""
    on_processor: list[Sample]
    """Seconds of all threads of the process on processors."""


async def collectives(
    port: Port, empty: Callable[[int], Tensor], device: torch.device = HOST
) -> list[CollectiveSamples]:
    """Samples of each kind that a strategy may use, of tensors on `device`. `empty(numel)` makes memory for sums."""
    found = []
    for kind in _COLLECTIVES:
        one = CollectiveSamples(kind, [], [])
        for num_bytes in _COLLECTIVE_SIZES:
            call = _collective(port, kind, num_bytes // 4, empty, device)
            op = call()
            assert isinstance(op, Collective)
            use = KernelUse(COLLECTIVE.format(kind=kind), num_rounds(op), member_bytes(op, port.rank))
            seconds, processor_s = await _repeated(port, call, device)
            one.taken.append((num_bytes, seconds))
            one.on_processor.append(Sample((use,), processor_s))
        found.append(one)
    return found


def _collective(
    port: Port, kind: str, numel: int, empty: Callable[[int], Tensor], device: torch.device
) -> Callable[[], Op[Any] | Program[Any]]:
    if kind == "all_reduce":
        buffer = empty(numel)
        return lambda: port.all_reduce(buffer)
    if kind == "all_gather":
        mine = torch.zeros(numel, device=device)
        return lambda: port.all_gather(mine)
    pieces = [torch.zeros(numel if to != port.rank else 0, device=device) for to in range(port.size)]
    return lambda: port.all_to_all(pieces, pieces)


async def _repeated(
    port: Port, call: Callable[[], Op[Any] | Program[Any]], device: torch.device
) -> tuple[float, float]:
    """The median seconds, and the mean seconds on processors, of a number of calls that is equal on all ranks."""
    await call()
    synchronize(device)
    begin_s = time.perf_counter()
    await call()
    synchronize(device)
    once_s = float((await port.all_reduce(torch.tensor([time.perf_counter() - begin_s])))[0]) / port.size
    taken, processor_s = [], time.process_time()
    for _ in range(max(3, min(_MESSAGES, int(_MOST_S / max(once_s, 1e-6) / 4)))):
        begin_s = time.perf_counter()
        await call()
        synchronize(device)
        taken.append(time.perf_counter() - begin_s)
    return median(taken), (time.process_time() - processor_s) / len(taken)


async def _pair(port: Port, source: int, target: int) -> LinkSample:
    """The side that measures."""
    samples, large = [], list[float]()
    for num_bytes in _SIZES:
        large = await _exchanged(port, target, num_bytes)
        samples.append(Sample((KernelUse("message", 2, num_bytes + _SIZES[0]),), median(large)))
    speed = fitted(samples)["message"]
    both_s = median(await _both_ways(port, target))
    alone_s = _LARGE * speed.byte_s
    duplex = min(1.0, max(0.5, alone_s / max(both_s - speed.call_s, 1e-9)))
    ordered = sorted(large)
    spread = (ordered[int(0.9 * len(ordered))] - ordered[int(0.1 * len(ordered))]) / median(ordered)
    return LinkSample(source, target, Link(speed.call_s, 1 / max(speed.byte_s, 1e-13), duplex), spread)


async def _other(port: Port, source: int, target: int) -> list[LinkSample]:
    """The side that answers."""
    for num_bytes in _SIZES:
        await _answered(port, source, num_bytes)
    await _both_ways(port, source)
    return []


async def _exchanged(port: Port, to: int, num_bytes: int) -> list[float]:
    """Seconds of each exchange, repeated for a time; the first number of a message marks the last one."""
    message, answer, taken, begun_s = torch.zeros(num_bytes // 4), torch.zeros(2), list[float](), time.perf_counter()
    most = _MESSAGES if num_bytes < _LARGE // 4 else _TRANSFERS
    while not message[0]:
        late = time.perf_counter() - begun_s > _MOST_S and len(taken) + 1 >= _FEWEST
        message[0] = float(late or len(taken) + 1 == most)
        begin_s = time.perf_counter()
        await port.send(message, to)
        answer.copy_(await port.recv(answer, to))
        taken.append(time.perf_counter() - begin_s)
    return taken


async def _answered(port: Port, source: int, num_bytes: int) -> None:
    message, answer = torch.zeros(num_bytes // 4), torch.zeros(2)
    while not message[0]:
        message.copy_(await port.recv(message, source))
        await port.send(answer, source)


async def _both_ways(port: Port, other: int) -> list[float]:
    """Seconds of each exchange; the lower rank marks its last message by the first number."""
    mine, theirs, taken = torch.zeros(_LARGE // 4), torch.zeros(_LARGE // 4), list[float]()
    leads, begun_s = port.rank < other, time.perf_counter()
    while not (mine if leads else theirs)[0]:
        if leads:
            late = time.perf_counter() - begun_s > _MOST_S and len(taken) + 1 >= _FEWEST
            mine[0] = float(late or len(taken) + 1 == _TRANSFERS)
        begin_s = time.perf_counter()
        theirs.copy_(await port.send_receive(mine, other, like=theirs, source=other))
        taken.append(time.perf_counter() - begin_s)
    return taken
