"""Pushes that workers of a host make together: their conditions, their costs, and the outcomes of a sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo import strategies as s
from polytempo.chaos.copies import new_shard
from polytempo.compression import bf16
from polytempo.core.rule import Add, Answer, Arrival, Rule, Situation, Update
from polytempo.jobs.digits import job
from polytempo.server.message import COORDINATOR, Members, Push, PushAlone, Pushed, PushPart, Reply
from polytempo.server.rules.asynchronous import on_arrival, softsync
from polytempo.server.shard.shard import Shard

NUMEL = sum(p.numel() for p in job.model().parameters())


@pytest.mark.parametrize(
    ("rule", "updates"),
    [(on_arrival(), [Update(1.0)]), (softsync(1, workers=3), [Update(3.0)]), (softsync(1, workers=4), [])],
    ids=lambda what: getattr(what, "name", ""),
)
def test_a_sum_is_added_once_and_counts_as_all_its_gradients(rule: Rule, updates: list[Update]) -> None:
    arrival = Arrival("push", 0, 1, 0, 8, (0,), others=(1, 2))
    _, actions = rule.receive(rule.init(), arrival, Situation(0, (0, 1, 2)))
    assert actions == [Add(0), *updates, Answer(0), Answer(1), Answer(2)]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (lambda: s.softsync(scale="inverse", hierarchical=True), "its own staleness"),
        (lambda: s.async_sgd(codec=bf16(), hierarchical=True), "leave out one of the two"),
    ],
)
def test_what_cannot_be_summed_is_refused(strategy: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        strategy()  # type: ignore[operator]


def test_tables_and_own_loops_are_refused() -> None:
    def sparse() -> nn.Module:
        return nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Flatten(), nn.Linear(128, 10))

    words = TensorDataset(torch.zeros(8, 64, dtype=torch.long), torch.zeros(8, dtype=torch.long))
    rows = pt.Job(
        model=sparse,
        data=lambda _: pt.Data(words),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    )
    with pytest.raises(ValueError, match="touched rows"):
        pt.simulate(rows, s.async_sgd(hierarchical=True), workers=2, epochs=1)
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="PT1106"):
        pt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), s.async_sgd(hierarchical=True))


def test_its_name_can_be_parsed_and_is_left_out_by_default() -> None:
    strategy = s.downpour(hierarchical=True)
    assert str(pt.parse_strategy(str(strategy))) == str(strategy)
    assert "hierarchical" not in str(s.downpour())


# ---------------------------------------------------------------------- at a shard


def shard_of(workers: int) -> Shard:
    shard = new_shard(0, 1, 4, on_arrival())
    shard.apply(Members(COORDINATOR, 1, 1, tuple((worker, 1) for worker in range(workers))))
    return shard


def pushed(tickets: tuple[int, ...], sequence: int = 1, value: float = -1.0) -> Push:
    """Worker i's gradient is of the ith ticket; worker 0 sends all."""
    gradient = torch.zeros(4)
    gradient[list(tickets)] = value
    parts = tuple(PushPart(worker, 1, sequence, 1, 0, 1, (t,)) for worker, t in enumerate(tickets) if worker)
    return Push(0, 1, sequence, 1, 0, 1, (1.0,), tickets[:1], gradient, parts=parts)


def kinds(replies: list[Reply] | tuple[Reply, ...]) -> list[tuple[str, int]]:
    return [(type(reply).__name__, reply.worker) for reply in replies]


def test_a_sum_is_one_entry_and_answers_each_worker() -> None:
    shard = shard_of(3)
    replies = shard.apply(pushed((0, 1, 2)))
    assert kinds(replies) == [("Pushed", 0), ("Pushed", 1), ("Pushed", 2)]
    assert shard.weights.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert (shard.version, shard.index, shard.decisions.applied.tuples) == (1, 2, ((0, 2),))
    assert dict(shard.decisions.staleness) == {0: 3}


def test_a_sum_is_refused_as_a_whole_where_one_part_is_known() -> None:
    shard = shard_of(3)
    alone = PushPart(1, 1, 1, 1, 0, 1, (1,))
    shard.apply(Push(*(alone.worker, 1, 1, 1, 0, 1), (1.0,), (1,), torch.tensor([0.0, -1.0, 0.0, 0.0])))
    status = shard.status_of(pushed((0, 1, 2)))
    assert (status.kind, kinds(status.replies)) == ("split", [("PushAlone", 0), ("Pushed", 1), ("PushAlone", 2)])
    assert shard.weights.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_a_sum_of_a_worker_that_was_lost_is_refused_as_a_whole() -> None:
    status = shard_of(2).status_of(pushed((0, 1, 2)))
    assert kinds(status.replies) == [("PushAlone", 0), ("PushAlone", 1), ("Stranger", 2)]


def test_a_sum_with_a_ticket_that_is_applied_is_refused_as_a_whole() -> None:
    shard = shard_of(3)
    shard.apply(pushed((0, 1)))
    status = shard.status_of(pushed((2, 1), sequence=2))
    assert kinds(status.replies) == [("PushAlone", 0), ("PushAlone", 1)]


def test_nan_in_a_sum_is_found_by_the_pushes_that_follow() -> None:
    shard = shard_of(2)
    assert all(isinstance(reply, PushAlone) for reply in shard.apply(pushed((0, 1), value=float("nan"))))
    [good] = shard.apply(pushed((0,)))
    assert isinstance(good, Pushed)
    assert good.verdict == "applied"


# ---------------------------------------------------------------------- in the virtual world


def test_pushes_between_hosts_are_divided_by_their_workers() -> None:
    """Two hosts of two workers: the shard gets half as many gradients, and each batch counts once."""
    counted = {}
    for hierarchical in (False, True):
        cluster = pt.cluster.ethernet(workers_per_host=2)
        strategy = s.async_sgd(hierarchical=hierarchical)
        counted[hierarchical] = pt.simulate(job, strategy, workers=4, cluster=cluster, epochs=2)
    each, together = counted[False].server, counted[True].server
    assert each is not None
    assert together is not None
    assert each["updates"] == 90
    assert together["updates"] == 46  # the first of each worker alone: no worker has heard of another
    assert sum(worker["samples"] for worker in together["workers"]) == sum(w["samples"] for w in each["workers"])


def test_the_traffic_model_says_what_is_sent() -> None:
    """Each worker sends a gradient; each host sends one over the network."""
    found = pt.explain(s.async_sgd(shards=2, hierarchical=True), 4, NUMEL, hosts=[0, 0, 1, 1]).at(1)
    assert found[:3] == (2 + 4 + 8, 4 * 4 * NUMEL, 4 * 4 * NUMEL)
    alone = pt.explain(s.async_sgd(shards=2, hierarchical=True), 4, NUMEL).at(1)
    assert alone == pt.explain(s.async_sgd(shards=2), 4, NUMEL).at(1)
