"""Records of exchanges of a worker that trains through a bucket: its requests, bytes and waits between two rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.report.status.records import ExchangeRow
from polytempo.report.status.stream import stream
from polytempo.worlds.object_store.store_world import StoreWorld
from store_workers import Crew, Faults

LATE_S, REQUEST_S = 5.0, 0.01
STRATEGIES = ["diloco(period=4)", "async_diloco(period=4)", "decoupled_diloco(period=4, quorum=2)"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_worker_of_a_bucket_has_records_of_its_requests(strategy: str, tmp_path: Path) -> None:
    """Each request takes 10 ms. Worker 1 comes five seconds late, and whoever needs it waits so long."""
    crew, made = Crew(2), dict[int, dict[str, Any]]()

    def work(world: StoreWorld) -> None:
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, strategy, world=world, out=tmp_path / "run")
        before = world.rounds.store.requests.totals
        for _ in range(12):
            optimizer.zero_grad()
            net(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            handle.log(own=1.0)
        handle.detach()
        now = world.rounds.store.requests.totals
        made[world.rank] = {
            op: [here - there for here, there in zip(each, before.get(op, (0, 0, 0.0)), strict=True)]
            for op, each in now.items()
        }
        world.leave()

    crew.add(0, work, objects=Faults(crew.objects, lambda *_: crew.clock.sleep(REQUEST_S / 2)))
    crew.add(1, work, at_s=LATE_S)
    assert crew.run() == [None, None]
    found = [record for record in stream(tmp_path / "run") if isinstance(record, ExchangeRow)]
    for op in ("put", "get"):
        rows = [record.ops[op] for record in found if op in record.ops]
        assert sum(row.count for row in rows) == made[0][op][0] > 0
        assert sum(row.bytes for row in rows) == made[0][op][1]
        assert sum(row.seconds for row in rows) == pytest.approx(made[0][op][2], rel=1e-3)
    assert sum(row.ops["put"].seconds for row in found if "put" in row.ops) >= REQUEST_S * made[0]["put"][0] - 1e-9
    waited = sum(record.waited_s for record in found)
    assert waited == 0.0 if strategy.startswith("async") else waited > LATE_S / 2
