"""Every strategy of the catalogue meets in an object store, at the price that `round_cost` gives, or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import polytempo as pt
from laws.catalogue import ROWS
from laws.test_store_rounds import loop, net_of, rows
from polytempo.core import Bundle, Strategy
from polytempo.synchronization.every import Timed
from polytempo.training.own_loop.store_loop import check_rare
from polytempo.worlds.object_store.object_store import StoreRequests, unpacked
from polytempo.worlds.object_store.round_cost import round_cost
from polytempo.worlds.object_store.store_world import StoreWorld
from store_workers import Crew, MemoryObjects

WORKERS = 3
RUN = {"diloco", "local_sgd", "slowmo", "sparse_loco"}
CODES = {"co2": "PT1206", "noloco": "PT2903", "parameter_averaging": "PT2905"}
"""Late exchanges, messages between two workers, an optimizer's state; all others exchange in every step: PT2901."""


def meetings(strategy: Strategy) -> Timed:
    return check_rare(strategy, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))


def refusal(strategy: Strategy) -> str | None:
    try:
        meetings(strategy)
    except pt.errors.Incompatible as refused:
        return refused.code
    return None


def test_strategies_by_their_defaults_run_or_are_refused_by_a_code() -> None:
    found = {name: refusal(pt.parse_strategy(name)) for name in pt.strategies.__all__}
    assert {name for name, code in found.items() if code is None} == RUN
    assert {name: code for name, code in found.items() if code not in (None, "PT2901")} == CODES


class Counting(MemoryObjects):
    """Bytes of tensors in objects of rounds, in the order of puts."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor_bytes = 0

    def create(self, name: str, content: bytes) -> None:
        super().create(name, content)
        if re.match(r"\d{8}\.", name):
            self.tensor_bytes += sum(t.numel() * t.element_size() for t in unpacked(content).tensors.values())


@pytest.mark.parametrize("make", [row.make for row in ROWS if refusal(row.make()) is None])
def test_a_round_costs_what_is_said_to_the_byte(make: Callable[[], Strategy]) -> None:
    strategy = str(make())
    parameters = Bundle({name: p.detach() for name, p in net_of(0).named_parameters()})
    cost = round_cost(meetings(make()).meeting, parameters, WORKERS)
    crew = Crew(WORKERS)
    crew.objects = objects = Counting()
    requests: list[StoreRequests] = []

    def work(world: StoreWorld) -> None:
        loop(strategy)(world)
        requests.append(world.rounds.store.requests)

    for worker in range(WORKERS):
        crew.add(worker, work)
    assert crew.run() == [None] * WORKERS
    rounds = len(rows(objects))
    assert rounds > 1
    assert sum(each.puts for each in requests) == rounds * cost.puts + 1 + WORKERS + 2, "the start, leaving, the end"
    assert sum(each.gets for each in requests) >= rounds * cost.gets
    assert objects.tensor_bytes == rounds * ((WORKERS - 1) * cost.sent_bytes + cost.merger_sent_bytes)
    received = sum(each.received_bytes for each in requests)
    assert received >= rounds * ((WORKERS - 1) * cost.received_bytes + cost.merger_received_bytes)


def test_the_time_of_a_round_is_of_the_requests_that_follow_each_other() -> None:
    """Meeting of 4: 9 requests. A sum of 400 bytes: part, look, 4 parts, sum, decision, look, sum: 10 requests."""
    parameters = Bundle({"w": torch.zeros(100)})
    cost = round_cost(meetings(pt.strategies.local_sgd(period=8)).meeting, parameters, 4)
    assert (cost.puts, cost.after_one_another, cost.bytes_after_one_another) == (15, 19, 400 + 1600 + 400 + 400)
    assert cost.seconds(100.0, 0.5) == 28.0 + 19.0
