"""Hosts with ranks that share cores, and messages that take the processor of their receiver."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polytempo.cluster import Cluster, KernelSpeed, Link, Speeds, slow_host
from polytempo.core import Port
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.worlds import VirtualWorld
from polytempo.worlds.virtual.clockwork import Asymmetric

FAST = Link(0.0, 1e15)
SPEEDS = Speeds(
    (
        ("elementwise", KernelSpeed(call_s=1.0)),
        ("message", KernelSpeed(call_s=0.25, byte_s=1e-3)),
    )
)


def ends(cluster: Cluster, seconds: list[float]) -> list[float]:
    """The end of each rank's computation of so many seconds, all from one begin."""

    async def program(port: Port) -> float:
        await port.compute(lambda: None, seconds[port.rank] * 1e9)
        return await port.now()

    return VirtualWorld(replace(cluster, flops_per_s=1e9), len(seconds)).run(program).results


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (None, [1.0, 2.0, 3.0]),
        (3, [1.0, 2.0, 3.0]),
        (2, [1.5, 2.5, 3.5]),  # 2/3 of a core each until 1.5 s, by when each has had 1 s; then one core each
        (1, [3.0, 5.0, 6.0]),
    ],
)
def test_ranks_of_a_host_share_its_cores(cores: int | None, expected: list[float]) -> None:
    cluster = Cluster(FAST, FAST, workers_per_host=3, cores=cores)
    assert ends(cluster, [1.0, 2.0, 3.0]) == pytest.approx(expected)


def test_no_rank_acts_for_others_that_take_its_cores() -> None:
    async def program(port: Port) -> None:
        await port.compute(lambda: None, 1e9)

    cluster = Cluster(FAST, FAST, workers_per_host=3, cores=2)
    with pytest.raises(Asymmetric):
        VirtualWorld(cluster, 3, acting=[0]).run(program)
    assert VirtualWorld(replace(cluster, cores=3), 3, acting=[0]).run(program).seconds > 0


def test_other_hosts_have_cores_of_their_own() -> None:
    cluster = Cluster(FAST, FAST, workers_per_host=2, cores=1)
    assert ends(cluster, [1.0, 1.0, 1.0]) == pytest.approx([2.0, 2.0, 1.0])


def test_a_rank_computes_one_thing_after_the_other_also_on_a_part_of_a_core() -> None:
    async def program(port: Port) -> list[float]:
        both = [await port.start(port.compute(lambda: None, 1e9)) for _ in range(2)]
        found = []
        for work in both:
            await work
            found.append(await port.now())
        return found

    cluster = Cluster(FAST, FAST, workers_per_host=2, cores=1, flops_per_s=1e9)
    assert VirtualWorld(cluster, 2).run(program).results == [pytest.approx([2.0, 4.0])] * 2


def test_servers_share_the_workers_hosts_where_cores_count() -> None:
    assert Cluster(FAST, workers_per_host=2, servers=2).hosts(6) == (0, 0, 1, 1, 2, 3)
    assert Cluster(FAST, workers_per_host=2, servers=3, cores=2).hosts(7) == (0, 0, 1, 1, 0, 1, 0)


def test_hosts_of_one_machine_share_its_cores() -> None:
    """Hosts 0 and 1 are on one machine, host 2 on another."""
    cluster = Cluster(FAST, FAST, cores=1, hosts_per_machine=2)
    assert ends(cluster, [1.0, 1.0, 1.0]) == pytest.approx([2.0, 2.0, 1.0])
    assert ends(replace(cluster, hosts_per_machine=1), [1.0, 1.0, 1.0]) == pytest.approx([1.0, 1.0, 1.0])


def test_a_machine_has_a_core_and_a_host() -> None:
    with pytest.raises(ValueError, match="a machine has cores >= 1, got 0"):
        Cluster(FAST, cores=0)
    with pytest.raises(ValueError, match="a machine has hosts_per_machine >= 1, got 0"):
        Cluster(FAST, hosts_per_machine=0)


@pytest.mark.parametrize("cores", [None, 1])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_message_takes_the_processor_of_its_receiver(factor: float, cores: int | None) -> None:
    """250 bytes: 0.25 s, and 0.25 s for the message itself, once the receiver has finished its computation.

    A straggler computes for longer, and takes no longer for a message.
    """

    async def program(port: Port) -> float:
        if port.rank == 0:
            await port.send(torch.zeros(250, dtype=torch.uint8), 1)
            return await port.now()
        coming = await port.start(port.recv(torch.zeros(250, dtype=torch.uint8), 0))
        await port.compute(lambda: None, 0.0, uses=(KernelUse("elementwise", 2),))
        assert await port.now() == pytest.approx(2.0 * factor), "it goes on while the message waits"
        await coming
        return await port.now()

    stragglers = slow_host(0, factor)
    cluster = Cluster(FAST, FAST, workers_per_host=2, speeds=SPEEDS, stragglers=stragglers, cores=cores)
    sent_s, received_s = VirtualWorld(cluster, 2).run(program).results
    assert (sent_s, received_s) == pytest.approx((0.0, 2.0 * factor + 0.5))


def test_without_its_kernel_a_message_takes_no_processor() -> None:
    async def program(port: Port) -> float:
        if port.rank == 0:
            await port.send(torch.zeros(250), 1)
        else:
            await port.recv(torch.zeros(250), 0)
        return await port.now()

    unmeasured = Speeds(tuple(each for each in SPEEDS.kernels if each[0] != "message"))
    assert VirtualWorld(Cluster(FAST, FAST, speeds=unmeasured), 2).run(program).seconds == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("cluster", "expected_s"),
    [
        (Cluster(FAST, FAST, cores=1, hosts_per_machine=2), 1.0),
        (Cluster(FAST, FAST, cores=2, hosts_per_machine=2), 0.0),
        (Cluster(FAST, FAST, cores=1), 0.0),
        (Cluster(Link(1.5, 1e15), FAST, cores=1, hosts_per_machine=2), 3.0),
    ],
    ids=["shared core", "two cores", "two machines", "slow link"],
)
def test_a_collective_takes_cores_that_its_ranks_share(cluster: Cluster, expected_s: float) -> None:
    """Two ranks, two rounds of 0.25 s each: a second of one core, while messages are under way."""
    kernels = (("elementwise", KernelSpeed()), ("collective all_reduce", KernelSpeed(call_s=0.25)))

    async def program(port: Port) -> float:
        await port.all_reduce(torch.zeros(2))
        return await port.now()

    found = VirtualWorld(replace(cluster, speeds=Speeds(kernels)), 2).run(program).results
    assert found == [pytest.approx(expected_s)] * 2


def test_a_rank_computes_more_slowly_while_its_collective_takes_the_core() -> None:
    kernels = (("elementwise", KernelSpeed(call_s=1.0)), ("collective barrier", KernelSpeed(call_s=0.5)))
    cluster = Cluster(FAST, FAST, cores=1, hosts_per_machine=2, speeds=Speeds(kernels))

    async def program(port: Port) -> float:
        meeting = await port.start(port.barrier())
        await port.compute(lambda: None, 0.0, uses=(KernelUse("elementwise"),))
        computed_s = await port.now()
        await meeting
        return computed_s

    found = VirtualWorld(cluster, 2).run(program)
    assert found.results == [pytest.approx(4.0)] * 2, "two computations and two parts of the barrier, a second each"
    assert found.seconds == pytest.approx(4.0)
