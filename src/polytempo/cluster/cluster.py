"""`Cluster`: the machines of a virtual world: hosts, links, speeds, stragglers and injected faults."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from polytempo.cluster.collective_link import CollectiveLink
from polytempo.cluster.computing_time import MESSAGE, KernelSpeed, Speeds
from polytempo.cluster.device_speeds import DeviceSpeeds
from polytempo.cluster.stragglers import Stragglers, constant

if TYPE_CHECKING:
    from polytempo.core.arithmetic.kernel_use import Uses


@dataclass(frozen=True)
class Link:
    """One end of a connection: α seconds until the first byte arrives, then B bytes a second.

    With `duplex` d a message takes the other direction of its ends, too, for 1/d - 1 times as long as its own: 1 is
    full duplex, and 0.5 one medium that both directions share.
    """

    latency_s: float
    bytes_per_s: float
    duplex: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError for a negative latency, no bandwidth, or directions that cannot be."""
        if not 0 <= self.latency_s < inf or not self.bytes_per_s > 0:
            raise ValueError(f"a link needs latency_s >= 0 and bytes_per_s > 0, got {self}")
        if not 0.5 <= self.duplex <= 1:
            raise ValueError(f"a link's duplex is from 0.5 (one medium) to 1 (full duplex), got {self}")


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal shape, joined by a network that never blocks inside; contention is at each host's end.

    Messages between hosts share their hosts' `network` link (one queue out, one queue in); messages
    within a host use the `memory` link of the two ranks. A computation of `f` flops takes
    `f / flops_per_s` seconds times the stragglers' factor; on a cluster with `speeds` the time of its kernels.
    """

    network: Link
    memory: Link = Link(latency_s=1e-6, bytes_per_s=10e9)
    workers_per_host: int = 1
    servers: int = 0
    """Number of the last ranks that are servers: each has a host of its own, after the workers' hosts; where `cores`
    are counted they are on the workers' hosts, one after the other."""
    cores: int | None = None
    """Cores of a machine, for all of its ranks together; None: each rank has a processor of its own."""
    hosts_per_machine: int = 1
    """Number of hosts, one after the other, that share the cores of one machine: containers, or network namespaces."""
    flops_per_s: float = 10e9
    server_flops_per_s: float | None = None
    """Operations a second of servers; None: `flops_per_s`."""
    speeds: Speeds | None = None
    """Speeds of measured kernels; None: `flops_per_s` is for everything."""
    server_speeds: Speeds | None = None
    """Speeds of servers; None: `speeds`."""
    device: DeviceSpeeds | None = None
    """The devices of a host, if they were measured; see `on_device`."""
    computes_on: str = ""
    """The kind of the device that workers compute on; "": on the host."""
    collectives: tuple[tuple[str, CollectiveLink], ...] = ()
    """Rates of the world's own collectives, by place and kind (`memory all_reduce`, `network all_gather`, …), if they
    differ from the rates of messages. Kinds that are not named go by `network` and `memory`."""
    stragglers: Stragglers = field(default_factory=constant)
    busy_stragglers: Stragglers | None = None
    """Stragglers while as many other programs compute on each host as workers do; None: not measured."""
    faults: tuple[Fault, ...] = ()
    in_bucket: bool = False
    """True if workers reach an object store alone, each by its `network` link: a strategy's meetings are rounds of
    requests there (`worlds.object_store`), pushed movements entries of a log, and other strategies are refused."""
    detection_s: float = 1e-3
    """Seconds from a rank's death until its peers' operations fail."""
    name: str = "cluster"

    def __post_init__(self) -> None:
        """Raise ValueError for a cluster without workers or speed."""
        if self.cores is not None and self.cores < 1:
            raise ValueError(f"a machine has cores >= 1, got {self.cores}")
        if self.hosts_per_machine < 1:
            raise ValueError(f"a machine has hosts_per_machine >= 1, got {self.hosts_per_machine}")
        if self.workers_per_host < 1 or not min(self.flops_per_s, self.server_flops_per_s or 1.0) > 0:
            raise ValueError(
                f"a cluster needs workers_per_host >= 1 and flops_per_s > 0, got {self.workers_per_host} "
                f"and {self.flops_per_s}"
            )

    def computing_s(self, flops: float, uses: Uses = (), *, server: bool = False) -> float:
        """Seconds of a computation at full speed: of its kernels where they were measured, else of its operations."""
        speeds = self.speeds if not server or self.server_speeds is None else self.server_speeds
        if speeds is not None and uses:
            return speeds.seconds(uses)
        return flops / (self.flops_per_s if not server or self.server_flops_per_s is None else self.server_flops_per_s)

    def with_kernel(self, kernel: str, speed: KernelSpeed) -> Cluster:
        """The same, but `kernel` at that speed. Raises ValueError where kernels were not measured."""
        if self.speeds is None:
            raise ValueError(f"{self.name} has one speed for everything; `polytempo calibrate` measures kernels")
        return replace(self, speeds=self.speeds.with_kernel(kernel, speed))

    def on_device(self) -> Cluster:
        """The cluster with workers that compute on the measured device: its kernels in place of the host's.

        Servers, messages, and the work of a step around its kernels stay the host's. Cores of the host are not counted.
        A job has its pace on the device, if it was measured there.
        """
        if self.device is None or self.speeds is None or self.computes_on:
            return self
        own, measured = dict(self.speeds.kernels), dict(self.device.speeds.kernels)
        speeds = Speeds(tuple(sorted((own | measured).items())), self.device.speeds.jobs)
        flop_s = speeds.of("product").flop_s
        return replace(
            self,
            speeds=speeds,
            server_speeds=self.server_speeds or self.speeds,
            flops_per_s=1 / flop_s if flop_s else self.flops_per_s,
            server_flops_per_s=self.server_flops_per_s or self.flops_per_s,
            cores=None,
            computes_on=self.device.kind,
            name=f"{self.name}, {self.device.name}",
        )

    def staged(self, workers: int) -> bool:
        """True if tensors of so many workers go through the host's memory, because they share devices."""
        here = min(workers, self.workers_per_host)
        return bool(self.computes_on) and self.device is not None and workers > 1 and self.device.staged(here)

    def _between_devices(self, workers: int) -> bool:
        """True if sums of so many workers go from device to device."""
        return bool(self.computes_on) and workers > 1 and not self.staged(workers)

    @property
    def handles_messages(self) -> bool:
        """True if a processor's work for a received message was measured."""
        return self.speeds is not None and self.speeds.measured(MESSAGE)

    def hosts(self, num_ranks: int) -> tuple[int, ...]:
        """The host of each rank: filled one after the other, and then one for each server, unless cores are counted."""
        workers = tuple(rank // self.workers_per_host for rank in range(num_ranks - self.servers))
        first = max(workers, default=-1) + 1
        if self.cores is not None:
            return workers + tuple(server % max(first, 1) for server in range(self.servers))
        return workers + tuple(range(first, first + self.servers))

    def shares_cores(self, workers: int) -> bool:
        """True if a machine has more of so many workers than cores."""
        return self.cores is not None and min(workers, self.hosts_per_machine * self.workers_per_host) > self.cores

    def slowest_link(self, hosts: tuple[int, ...], kind: str = "", num_bytes: float = 0.0) -> Link:
        """The link that bounds a collective of that kind among ranks on these hosts, of messages with so many bytes."""
        within = len(set(hosts)) <= 1
        between = self.device.collectives if self._between_devices(len(hosts)) and self.device is not None else ()
        name = f"memory {kind}" if within else f"network {kind}"
        for each, link in (*between, *self.collectives):
            if each == name:
                return Link(link.latency_s(num_bytes), link.bytes_per_s)
        return self.memory if within else self.network


@dataclass(frozen=True)
class Crash:
    """Rank `rank` dies: when it marks step `step`, or at time `at_s`. Give exactly one of the two."""

    rank: int
    step: int | None = None
    at_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless exactly one of step and time is given."""
        if (self.step is None) == (self.at_s is None):
            raise ValueError(f"a crash happens at a step or at a time: give one of them, got {self}")
        if self.at_s is not None and self.at_s < 0:
            raise ValueError(f"a crash needs at_s >= 0, got {self}")


@dataclass(frozen=True)
class Pause:
    """Rank `rank` stands still for `seconds` when it marks step `step`."""

    rank: int
    step: int
    seconds: float

    def __post_init__(self) -> None:
        """Raise ValueError for a negative duration."""
        if self.seconds < 0:
            raise ValueError(f"a pause needs seconds >= 0, got {self}")


Fault = Crash | Pause


_BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def rate_of(text: str) -> float:
    """Bytes a second of "100mbit", "2.5gbit" or "1gbit/s". Raises ValueError for other texts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s)?", text.strip().lower())
    if not found or not float(found[1]):
        raise ValueError(f"{text}: write a speed like 100mbit, 1gbit or 2.5gbit")
    return float(found[1]) * _BITS_PER_S[found[2]] / 8
