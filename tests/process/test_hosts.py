"""Ranks of several hosts: shared memory within each, gloo between them; and gloo alone where some rank cannot share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.interop.backend import across_hosts
from polytempo.native import library
from process.collective_calls import TABLE, WITHOUT_GLOO, attempted

pytestmark = pytest.mark.process

HOSTS = {"2 + 1": "AAB", "in turns": "ABA", "each alone": "ABC"}
"""The pretended hosts of three ranks."""


def begin(rank_info: RankInfo, host: str, backend: str = "polytempo") -> None:
    """Join the default group, as if on `host`."""
    os.environ["POLYTEMPO_HOST"] = host
    store = dist.FileStore(str(rank_info.rendezvous / "store"), rank_info.size)
    limit = timedelta(seconds=20)
    dist.init_process_group(backend, store=store, rank=rank_info.rank, world_size=rank_info.size, timeout=limit)


def run(hosts: str, work: Callable[[RankInfo], Result], backend: str = "polytempo") -> list[Any]:
    """The value of `work` on each rank, in a default group over `hosts`."""

    def joined(rank_info: RankInfo) -> Result:
        begin(rank_info, hosts[rank_info.rank], backend)
        try:
            return work(rank_info)
        finally:
            dist.destroy_process_group()

    return launch(joined, len(hosts), threads=1, timeout_s=60)


def backend_of(group: Any) -> str:
    """The class that serves a group."""
    return type(group).__name__


@pytest.fixture(scope="module", params=HOSTS)
def wrong(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Each rank's errors in each collective over the hosts."""

    def work(rank_info: RankInfo) -> Result:
        assert backend_of(dist.group.WORLD) == "HostsGroup"
        gloo = dist.new_group(backend="gloo")
        mirrored = {
            name: attempted(call, dist.group.WORLD, rank_info.rank, call(gloo, rank_info.rank))
            for name, call in TABLE.items()
        }
        return mirrored | {
            name: attempted(call, dist.group.WORLD, rank_info.rank, expected(rank_info.rank))
            for name, (call, expected) in WITHOUT_GLOO.items()
        }

    return run(HOSTS[request.param], work)


@pytest.mark.parametrize("name", [*TABLE, *WITHOUT_GLOO])
def test_a_collective_over_hosts_has_gloos_values(name: str, wrong: list[dict[str, str]]) -> None:
    assert [rank[name] for rank in wrong] == ["", "", ""]


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
def test_a_large_tensor_crosses_in_pieces(op: dist.ReduceOp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across_hosts, "_PIECE_BYTES", 40)

    def work(rank_info: RankInfo) -> Result:
        local = dist.group.WORLD.group.local  # type: ignore[union-attr]
        reduce, sizes = local.all_reduce, list[int]()
        local.all_reduce = lambda tensor, *args, **more: (sizes.append(tensor.numel()), reduce(tensor, *args, **more))
        tensor, least = torch.arange(57.0).view(3, 19) + rank_info.rank, torch.arange(31).short() * rank_info.rank
        dist.all_reduce(tensor, op)
        dist.reduce(least, 1)
        return [tensor.tolist(), least.tolist(), sizes]

    count = 1 if op == dist.ReduceOp.AVG else 3
    expected = (count * (torch.arange(57.0).view(3, 19) + 1)).tolist()
    found = run("AAB", work)
    assert [rank[0] for rank in found] == 3 * [expected]
    assert found[1][1] == (3 * torch.arange(31)).tolist()
    assert [rank[2] for rank in found] == 3 * [[10, 10, 10, 10, 10, 7, 20, 11]]


@pytest.mark.parametrize("backend", ["polytempo", "cpu:polytempo,cuda:nccl"])
def test_groups_within_a_host_share_memory_and_those_across_go_through_it(backend: str) -> None:
    def work(rank_info: RankInfo) -> Result:
        found = []
        for members in ((0, 1), (1, 2), (0, 2), (2,), (2, 1, 0)):
            group = dist.new_group(list(members), backend=backend)
            if rank_info.rank in members:
                tensor = torch.full((3,), float(rank_info.rank))
                dist.all_reduce(tensor, group=group)
                gathered: list[Any] = [None] * len(members)
                dist.all_gather_object(gathered, rank_info.rank, group=group)
                found.append([backend_of(group), float(tensor[0]), gathered])
        return found

    shared, hosts = "SharedMemoryGroup", "HostsGroup"
    assert run("AAB", work, backend) == [
        [[shared, 1, [0, 1]], [hosts, 2, [0, 2]], [hosts, 3, [0, 1, 2]]],
        [[shared, 1, [0, 1]], [hosts, 3, [1, 2]], [hosts, 3, [0, 1, 2]]],
        [[hosts, 3, [1, 2]], [hosts, 2, [0, 2]], [shared, 2, [2]], [hosts, 3, [0, 1, 2]]],
    ]


def test_ddp_over_hosts_trains_all_ranks_alike() -> None:
    def work(rank_info: RankInfo) -> Result:
        torch.manual_seed(0)
        net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 4)))
        optimizer = SGD(net.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank_info.rank))).pow(
                2
            ).mean().backward()
            optimizer.step()
        return float(sum(parameter.detach().double().sum() for parameter in net.parameters()))

    over_hosts, alone = run("AAB", work), run("AAA", work)
    assert len(set(over_hosts)) == 1
    assert over_hosts[0] == pytest.approx(alone[0], rel=1e-5)


def test_without_the_core_on_one_rank_all_go_through_gloo_and_one_says_so() -> None:
    def work(rank_info: RankInfo) -> Result:
        if rank_info.rank == 1:
            os.environ["POLYTEMPO_NATIVE"] = "0"
            library._opened.cache_clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            begin(rank_info, "")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        name = backend_of(dist.group.WORLD)
        dist.destroy_process_group()
        return [float(tensor[0]), name, [str(each.message) for each in said if each.category is RuntimeWarning]]

    first, *others = launch(work, 3, threads=1, timeout_s=60)
    text = "polytempo goes through gloo: rank 1 has no native core: POLYTEMPO_NATIVE=0 in the environment; unset it"
    assert first[:2] == [3, "ProcessGroup"]
    assert len(first[2]) == 1
    assert first[2][0].startswith(text)
    assert others == [[3, "ProcessGroup", []]] * 2
