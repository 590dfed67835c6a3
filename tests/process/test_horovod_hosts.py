"""`polytempo.horovod.torch` with ranks that pretend to be on several hosts: tensors cross the network host by host."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import polytempo.horovod.torch as hvd
from horovod_checks import equal, values
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.horovod.torch.process_state import PROCESS

pytestmark = pytest.mark.process


@pytest.mark.parametrize("hosts", ["AABB", "ABA", "ABC"])
def test_operations_over_hosts_have_the_values_of_one_host(hosts: str) -> None:
    """Gathers, of other numbers of rows on each rank, go through no gloo group of all ranks."""
    size = len(hosts)

    def work(rank_info: RankInfo) -> Result:
        os.environ["POLYTEMPO_HOST"] = hosts[rank_info.rank]
        hvd.init()
        rank = hvd.rank()
        group: Any = PROCESS.opened().performer._transports[0]._group
        assert type(group).__name__ == "HostsGroup"
        equal(hvd.allreduce(values(rank), op=hvd.Sum), sum(values(r) for r in range(size)))
        equal(hvd.broadcast(values(rank), size - 1), values(size - 1))
        equal(hvd.alltoall(torch.arange(size) + 10 * rank), torch.arange(0, 10 * size, 10) + rank)
        equal(hvd.reducescatter(torch.full((size, 2), 1.0 + rank), op=hvd.Max), torch.full((1, 2), float(size)))
        group.group.gloo = None
        for rows in (list(range(size)), [0] * size, [5 * (r == size - 1) for r in range(size)]):
            for dtype in (torch.float32, torch.bool, torch.int16):
                found = hvd.allgather(values(rank, dtype, (rows[rank], 3)))
                equal(found, torch.cat([values(r, dtype, (rows[r], 3)) for r in range(size)]))
        hvd.shutdown()
        return None

    launch(work, size, threads=1, timeout_s=100)
