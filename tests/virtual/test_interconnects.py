"""docs/interconnects.md: its constants are the presets', and the clock charges messages as the page says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import polytempo as pt
from helpers import payload
from polytempo.cluster import Cluster
from polytempo.core import Port
from polytempo.worlds import VirtualWorld

PAGE = (Path(__file__).parents[2] / "docs" / "interconnects.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)\(\)` \|(.+)\|$", PAGE, flags=re.MULTILINE)
PRESETS: dict[str, Callable[[], Cluster]] = {
    "ethernet": pt.cluster.ethernet,
    "infiniband": pt.cluster.infiniband,
    "internet": pt.cluster.internet,
    "one_host": pt.cluster.one_host,
}
BYTES = 10**6


def constants(cluster: Cluster) -> list[float]:
    links = [x for link in (cluster.network, cluster.memory) for x in (link.latency_s * 1e6, link.bytes_per_s / 1e9)]
    return [*links, cluster.workers_per_host, cluster.flops_per_s / 1e9]


def test_the_page_has_each_preset_once() -> None:
    assert [name for name, _ in ROWS] == list(PRESETS)


@pytest.mark.parametrize(("name", "cells"), ROWS, ids=[name for name, _ in ROWS])
def test_the_constants_of_the_page_are_the_presets(name: str, cells: str) -> None:
    cluster = PRESETS[name]()
    assert [float(cell) for cell in cells.split("|")] == pytest.approx(constants(cluster), rel=1e-12)
    assert (cluster.network.duplex, cluster.memory.duplex, cluster.speeds) == (1, 1, None)


def arrivals(cluster: Cluster, sends: list[tuple[int, int]], num_ranks: int) -> dict[int, float]:
    """The arrival of a message of a megabyte at each receiver, where all are sent at 0."""

    async def program(port: Port) -> float:
        for work in [await port.start(port.send(payload(BYTES), to)) for source, to in sends if source == port.rank]:
            await work
        for source, to in sends:
            if to == port.rank:
                await port.recv(payload(BYTES), source)
        return await port.now()

    results = VirtualWorld(cluster, num_ranks).run(program).results
    return {to: found for to, found in enumerate(results) if found is not None and to in {to for _, to in sends}}


@pytest.mark.parametrize("name", PRESETS)
def test_a_message_takes_its_latency_and_its_bytes_over_the_rate(name: str) -> None:
    """Rank 0 sends to the last worker of its host and to the first worker of another host, at the same time."""
    cluster = PRESETS[name]()
    near, far = cluster.workers_per_host - 1, cluster.workers_per_host
    network, memory = cluster.network, cluster.memory
    expected = {far: network.latency_s + BYTES / network.bytes_per_s}
    if near:
        expected[near] = memory.latency_s + BYTES / memory.bytes_per_s
    assert arrivals(cluster, [(0, to) for to in expected], far + 1) == pytest.approx(expected, rel=1e-9)


def test_eight_accelerators_share_one_adapter() -> None:
    """Messages of two workers of a host wait in line; an adapter for each is eight times the rate of one."""
    shared, alone = pt.cluster.infiniband(), pt.cluster.infiniband(gbit_per_s=1600)
    first, second = arrivals(shared, [(0, 8), (1, 16)], 17).values()
    assert (first, second) == pytest.approx((2e-6 + BYTES / 25e9, 2e-6 + 2 * BYTES / 25e9), rel=1e-9)
    assert arrivals(alone, [(0, 8)], 9)[8] == pytest.approx(2e-6 + BYTES / 200e9, rel=1e-9)


def test_headers_of_tcp_take_a_share_of_the_rate() -> None:
    assert pt.cluster.ethernet(header_share=0.045).network.bytes_per_s == pytest.approx(0.955 * 1.25e9)
