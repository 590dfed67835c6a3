"""`ExchangeMeter`: counts of collectives on the backend "polytempo", and the same bits as without it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.interop import ExchangeMeter
from process.backend_group import run

pytestmark = pytest.mark.process

LATE_S = 0.3


def test_each_collective_is_counted_with_this_ranks_bytes() -> None:
    def work(rank_info: RankInfo) -> Result:
        meter, rows = ExchangeMeter(), []

        def counted() -> None:
            facts = meter.read()
            rows.append([facts["polytempo/exchanges"], facts["polytempo/exchange_bytes"]])

        tensor, both = torch.ones(10), torch.ones(20)
        for asynchronous in (False, True):
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if work is not None:
                work.wait()
            counted()
        dist.all_gather(list(both.chunk(2)), tensor)
        counted()
        dist.reduce_scatter(tensor, list(both.chunk(2)))
        counted()
        dist.broadcast(tensor, 1)
        counted()
        counted()
        return rows

    first, second = run(2, work)
    assert first == [[1, 40], [1, 40], [1, 40], [1, 80], [1, 0], [0, 0]]
    assert second == [[1, 40], [1, 40], [1, 40], [1, 80], [1, 40], [0, 0]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_program_stands_still_for_a_rank_that_comes_late(asynchronous: bool) -> None:
    def work(rank_info: RankInfo) -> Result:
        meter = ExchangeMeter()
        dist.barrier()
        meter.read()
        if rank_info.rank == 1:
            time.sleep(LATE_S)
        work = dist.all_reduce(torch.ones(10), async_op=asynchronous)
        if work is not None:
            work.wait()
        dist.barrier()
        facts = meter.read()
        return [facts["polytempo/wait_seconds"], facts["polytempo/exchange_seconds"]]

    early, _ = run(2, work)
    assert min(early) >= 0.9 * LATE_S


def trained(rank_info: RankInfo, meter: ExchangeMeter | None, *, late: int | None = None) -> list[float]:
    """Weights of a model after three steps of DDP; rank `late` comes late to each backward pass."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)), bucket_cap_mb=0.0001)
    if meter is not None:
        meter.read()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.full((2, 8), step + rank_info.rank + 1.0)).square().mean()
        if rank_info.rank == late:
            time.sleep(LATE_S)
        loss.backward()
        optimizer.step()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def test_ddp_is_measured_and_has_the_same_bits() -> None:
    def work(rank_info: RankInfo) -> Result:
        unseen = trained(rank_info, None)
        meter = ExchangeMeter()
        seen = trained(rank_info, meter, late=1)
        facts = meter.read()
        return [unseen == seen, facts]

    (same, early), (same_too, _) = run(2, work)
    assert same
    assert same_too
    parameters = 8 * 4 + 4 + 4 + 1
    assert early["polytempo/exchange_bytes"] >= 3 * 4 * parameters
    assert early["polytempo/exchanges"] >= 3
    assert early["polytempo/wait_seconds"] >= 0.9 * 3 * LATE_S  # at the ends of backward passes, inside DDP
    assert early["polytempo/exchange_seconds"] >= 0.9 * 3 * LATE_S


def test_other_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no process group"):
        ExchangeMeter()

    def work(rank_info: RankInfo) -> Result:
        try:
            ExchangeMeter(dist.new_group(backend="gloo"))
        except ValueError as error:
            return str(error)
        return ""

    assert "not gloo" in run(2, work)[0]
