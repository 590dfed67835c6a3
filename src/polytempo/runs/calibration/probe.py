"""A cluster's latency and rate of every pair of hosts, and their speed, measured by processes of an engine.

    round trip of 1 byte  /2                        latency, one way, from process to process
    n bytes there, 1 back, less two latencies       n / that: bytes a second, one way
    a product of matrices, on all at the same time  floating-point operations a second of each

Each figure is the best of several, because other programs only add time. Messages go by `Port.send`, as a run's own
routes do, so the rates are a run's rates, and not the cable's. One pair talks at a time.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations
from statistics import median
from typing import Any

import torch
from torch import Tensor

from polytempo.cluster.measured import Measured, MeasuredHost, MeasuredLink
from polytempo.core import Port
from polytempo.core.port import barrier
from polytempo.engines.collective import collected
from polytempo.engines.engine import Engine, EngineSetup, Launch, Role
from polytempo.engines.join.init import init
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.spec.placement import on_hosts
from polytempo.spec.run_spec import RunSpec

PROBE = "probe"
"""The role's kind of a process that measures."""
_ROUND_TRIPS, _TRANSFERS = 100, 3
_LEAST_TRANSFER_S = 0.3
_MOST_TRANSFER_BYTES = 64 << 20
_FIRST_TRANSFER_BYTES = 64 << 10
_MATRIX, _PRODUCTS = 384, 10
_TIMEOUT_S = 180.0


def measure(setup: EngineSetup, spec: RunSpec, name: str) -> Measured:
    """Measure with as many processes as `spec` has workers, placed as a run's are. `name`: the engine's, for the file.

    Cost: some 2 s for each ordered pair of hosts. Errors: `WorkerDied`, `RunTimedOut` and the engine's own.
    """
    return measured_of(name, answers(setup, spec, name, PROBE, probe))


def answers(
    setup: EngineSetup,
    spec: RunSpec,
    name: str,
    kind: str,
    work: Callable[[], dict[str, Any]],
    timeout_s: float = _TIMEOUT_S,
) -> list[dict[str, Any]]:
    """The answers of so many processes, by rank. They do `work`, which remote processes find by `kind`.

    Errors: as `measure`.
    """
    meetings: list[Rendezvous] = []

    def setting() -> dict[str, Any]:
        if not meetings:
            meetings.append(Rendezvous.held(engine.address.host))
        return {"rendezvous": meetings[0].url}

    launch = Launch(lambda role: work(), spec, setting, spec.workers, spec.workers, 1)
    try:
        with setup.open(launch) as engine:
            if engine.address.num_hosts > spec.workers:
                raise ValueError(
                    f"{name} has {engine.address.num_hosts} hosts, and {spec.workers} processes are not on all of "
                    f"them; use --workers {engine.address.num_hosts}, or twice as many to measure within hosts, too"
                )
            topology = on_hosts(spec.topology(), engine.address.num_hosts)
            return collected(_Probes(engine, kind), topology, timeout_s=timeout_s + spec.workers**2)
    finally:
        for meeting in meetings:
            meeting.close()


def measured_of(engine: str, told: Sequence[dict[str, Any]]) -> Measured:
    """The measurement from the answers of all processes, by rank."""
    of_rank, names = hosts_of(told)
    hosts = tuple(
        MeasuredHost(
            names[host],
            of_rank.count(host),
            median(each["flops_per_s"] for each, other in zip(told, of_rank, strict=True) if other == host),
        )
        for host in names
    )
    pairs = [(of_rank[a], of_rank[b], figures) for each in told for a, b, *figures in each["links"]]
    links = [(a != b, MeasuredLink(names[a], names[b], *map(float, figures[:2]))) for a, b, figures in pairs]
    between = tuple(link for is_between, link in links if is_between)
    within = tuple(link for is_between, link in links if not is_between)
    return Measured(engine, hosts, between, within)


def hosts_of(told: Sequence[dict[str, Any]]) -> tuple[list[int], dict[int, str]]:
    """The host of each rank, and the hosts' names. Hosts of one name get their number behind it."""
    of_rank = [int(each["host"]) for each in told]
    first = {host: of_rank.index(host) for host in dict.fromkeys(of_rank)}
    counts = Counter(told[rank]["name"] for rank in first.values())
    names = {host: told[rank]["name"] for host, rank in first.items()}
    return of_rank, {host: name if counts[name] == 1 else f"{name}-{host}" for host, name in names.items()}


class _Probes:
    """An `Engine` with processes that measure instead of being ranks."""

    def __init__(self, engine: Engine, kind: str) -> None:
        self._engine, self._kind = engine, kind
        self.address, self.poll, self.stop = engine.address, engine.poll, engine.stop

    def start(self, role: Role, host: int = 0) -> Any:
        """See `Engine`."""
        return self._engine.start(role._replace(kind=self._kind), host)


# ---------------------------------------------------------------------- in each process


def probe() -> dict[str, Any]:
    """Measure together with the other processes of the world; returns this one's answer, as plain data."""
    world = init(timeout_s=_TIMEOUT_S, device="cpu", quiet=True)
    port = world.port
    links = world.drive(_talk(port)) if port.size > 1 else []
    world.drive(barrier(port))
    speed = flops_per_s()
    world.drive(barrier(port))
    host = list(dict.fromkeys(port.hosts)).index(port.hosts[port.rank])
    return {"name": socket.gethostname(), "host": host, "links": links, "flops_per_s": speed}


def flops_per_s() -> float:
    """The speed of this process alone: the best of some products of two square matrices, 2n³ operations each."""
    left, right = torch.rand(_MATRIX, _MATRIX), torch.rand(_MATRIX, _MATRIX)
    best_s = float("inf")
    for _ in range(_PRODUCTS):
        begin_s = time.perf_counter()
        torch.mm(left, right)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * _MATRIX**3 / best_s


async def _talk(port: Port) -> list[tuple[int, int, float, float]]:
    """Every ordered pair of first ranks of hosts, and the first two ranks of each host, one after the other."""
    links = []
    for source, target in pairs_of(port.hosts):
        if port.rank == source:
            links.append((source, target, *await _lead(port, target)))
        elif port.rank == target:
            await _follow(port, source)
        await port.barrier()
    return links


def pairs_of(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of ranks that talk to each other; rank r is on host `hosts[r]`."""
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    between = permutations((of_host[0] for of_host in ranks.values()), 2)
    return [*between, *((of_host[0], of_host[1]) for of_host in ranks.values() if len(of_host) > 1)]


async def _lead(port: Port, target: int) -> tuple[float, float]:
    """Latency in seconds and bytes a second to `target`."""
    latency_s = min([await _round_trip_s(port, target, 1) for _ in range(_ROUND_TRIPS)]) / 2
    num_bytes = _FIRST_TRANSFER_BYTES
    while await _round_trip_s(port, target, num_bytes) < _LEAST_TRANSFER_S + 2 * latency_s:
        if num_bytes >= _MOST_TRANSFER_BYTES:
            break
        num_bytes *= 2
    best_s = min([await _round_trip_s(port, target, num_bytes) for _ in range(_TRANSFERS)])
    await port.send(_size(0), target)
    return latency_s, num_bytes / max(best_s - 2 * latency_s, 1e-9)


async def _round_trip_s(port: Port, target: int, num_bytes: int) -> float:
    """Send so many bytes and wait for a byte; the other side knows the size from the message before."""
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    await port.send(_size(num_bytes), target)
    await port.recv(message[:1], target)
    begin_s = time.perf_counter()
    await port.send(message, target)
    await port.recv(message[:1], target)
    return time.perf_counter() - begin_s


async def _follow(port: Port, source: int) -> None:
    """The other side of `_lead`."""
    answer = torch.zeros(1, dtype=torch.uint8)
    while num_bytes := int(await port.recv(_size(0), source)):
        await port.send(answer, source)
        await port.recv(torch.empty(num_bytes, dtype=torch.uint8), source)
        await port.send(answer, source)


def _size(num_bytes: int) -> Tensor:
    return torch.tensor([num_bytes])
