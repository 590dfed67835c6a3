"""Scores of a parameter server: the shards' parts of one snapshot, in any order of arrival."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polytempo.core.errors import TimedOut
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.evaluator import Evaluator, Scores
from polytempo.server.layout import Span
from polytempo.server.message import Scored, Shown

CHAINS = ((2,), (3,))
COORDINATOR, EVALUATOR = 4, 5


def shown(shard: int, number: int) -> Shown:
    """Shard s has element s of the parameters, and running statistics of its own: shards mix in pushes in any order."""
    value = torch.tensor([float(shard)])
    return Shown(shard, number, 0.0, (Span(shard, shard + 1),), value, value.double() + 10)


def test_the_running_statistics_are_the_first_shards_whichever_comes_first() -> None:
    """A replay could not tell otherwise; and workers pull the first one's, too."""
    scored: list[tuple[int, list[float], Tensor | None]] = []

    def score(number: int, seconds: float, flat: Tensor, running: Tensor | None) -> bytes:
        scored.append((number, flat.tolist(), running))
        return b"{}"

    for order in ((0, 1), (1, 0)):
        evaluator = Evaluator(EVALUATOR, COORDINATOR, CHAINS, 2, torch.float32, score)
        for shard in order:
            evaluator.receive(0.0, CHAINS[shard][0], shown(shard, 8))
        assert scored.pop() == (8, [0.0, 1.0], torch.tensor([10.0], dtype=torch.float64)), f"order {order}"


def done() -> BatchScheduler:
    """A scheduler with its only ticket, of one batch, done."""
    scheduler = BatchScheduler(batches_per_epoch=1, num_tickets=1, deals="freely", workers=1)
    scheduler.join(0, incarnation=1)
    scheduler.ask(0, incarnation=1, sequence=1, done=())
    scheduler.ask(0, incarnation=1, sequence=2, done=(0,))
    assert scheduler.finished
    return scheduler


def test_a_score_that_comes_when_all_is_done_stops_nothing() -> None:
    """Otherwise the run would end with an older score than its final weights'."""
    scheduler = done()
    scheduler.stop()
    assert not scheduler.stopped
    assert Scores(EVALUATOR, scheduler, 10.0).lacks_last(0.0)


def test_the_last_score_has_time_from_the_score_before_it() -> None:
    scores = Scores(EVALUATOR, done(), 10.0)
    assert scores.lacks_last(100.0)
    assert scores.take(Scored(0, b"{}"))
    assert scores.lacks_last(111.0)
    assert not scores.take(Scored(0, b"{}"))
    with pytest.raises(TimedOut, match=r"score of the last batch did not finish within 10 s .*larger timeout_s"):
        scores.lacks_last(122.0)
