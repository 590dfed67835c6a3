"""Records of exchanges in the stream of a run: each interval between two rows once, by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.report.status.records import ExchangeRow, TrainRow
from polytempo.report.status.stream import stream
from virtual.test_slow_rank import job

s = pt.strategies
NUM_BYTES = 4 * (16 * 32 + 32 + 32 * 32 + 32 + 32 + 1)
"""The bytes of the model's gradient, in one bucket."""
OF_SUM = NUM_BYTES * 3 // 2
"""The bytes that one of 4 ranks sends in a sum: 2 (n - 1) / n of the gradient."""
STEPS, EVERY = 12, 3
"""120 batches for 4 workers are 30 steps an epoch, so each third step has a row."""


@pytest.mark.parametrize(
    ("strategy", "ops"),
    [
        (s.sync_sgd(), [{"all_reduce": (3, 3 * OF_SUM)}] * 4),
        (s.local_sgd(period=6), [{}, {"all_reduce": (1, OF_SUM)}] * 2),
        (s.gossip(), [{"recv": (6, 0), "send": (6, 6 * NUM_BYTES)}] * 4),
    ],
    ids=str,
)
def test_each_interval_has_its_exchanges(strategy: Any, ops: list[dict[str, tuple[int, int]]], tmp_path: Path) -> None:
    result = pt.simulate(job(), strategy, 4, pt.cluster.ethernet(), steps=STEPS, out=tmp_path)
    records = stream(tmp_path)
    steps = [each.step for each in records if isinstance(each, TrainRow)]
    assert steps == list(range(EVERY, STEPS + 1, EVERY))
    found = {each.step: each for each in records if isinstance(each, ExchangeRow)}
    told = [found[step].ops if step in found else {} for step in steps]
    assert [{op: (each.count, each.bytes) for op, each in at.items()} for at in told] == ops
    assert [each.since_step for each in found.values()] == [step - EVERY for step in found]
    assert sum(each.waited_s for each in found.values()) <= result.seconds
    assert all(each.waited_s > 0 and sum(op.seconds for op in each.ops.values()) > 0 for each in found.values())


def test_each_worker_of_a_server_has_its_messages(tmp_path: Path) -> None:
    """The records of a worker follow each other, and have all that it has sent until its last row."""
    strategy = s.downpour(push_every=2, pull_every=2)
    pt.simulate(job(), strategy, 4, pt.cluster.ethernet(), steps=STEPS, out=tmp_path)
    records = [each for each in stream(tmp_path) if isinstance(each, ExchangeRow)]
    for worker in range(4):
        own = [each for each in records if each.worker == worker]
        assert len(own) == STEPS // EVERY
        assert [each.since_step for each in own] == [0, *(each.step for each in own[:-1])]
        posts = [each.ops["post"] for each in own]
        assert sum(each.bytes for each in posts) >= STEPS // 2 * NUM_BYTES > 0
        assert all("take" in each.ops and each.waited_s > 0 for each in own)


def test_one_worker_exchanges_nothing(tmp_path: Path) -> None:
    pt.simulate(job(), s.sync_sgd(), 1, pt.cluster.ethernet(), steps=24, out=tmp_path)
    records = stream(tmp_path)
    assert any(isinstance(each, TrainRow) for each in records)
    assert not any(isinstance(each, ExchangeRow) for each in records)
