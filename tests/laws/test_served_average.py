"""Moving averages of weights at the shards of a parameter server: their formula, both worlds, saved and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.catalogue import SERVED, Row
from laws.test_warm_start import PLAIN, loss_of, plain
from polytempo.core.calls.refusals import Incompatible
from polytempo.replay.replay import replay
from polytempo.server.layout import place_
from polytempo.server.shard.shard import Shard

s = pt.strategies
DECAY, STEPS = 0.7, 6
FIRST = {row.name: row for row in reversed(SERVED)}
"""One row of each strategy."""


@pytest.mark.parametrize("row", FIRST.values(), ids=list(FIRST))
def test_the_score_is_of_the_average_over_the_updates(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuilt by plain torch from the weights after each update of each shard, in the order of pushes."""
    strategy = row.make()
    averages: dict[int, Tensor] = {}
    spans: dict[int, Any] = {}
    taken = Shard._take_average

    def seen(shard: Shard) -> None:
        taken(shard)
        keeps = min(DECAY, (1 + shard.version) / (10 + shard.version))
        averages[id(shard)] = keeps * averages[id(shard)] + (1 - keeps) * shard.weights

    made = Shard.__init__

    def begun(shard: Shard, *given: Any, **more: Any) -> None:
        made(shard, *given, **more)
        averages[id(shard)], spans[id(shard)] = shard.weights.clone(), shard._all_spans
        kept.append(shard)

    kept: list[Shard] = []  # so that no id comes again
    monkeypatch.setattr(Shard, "_take_average", seen)
    monkeypatch.setattr(Shard, "__init__", begun)
    with_average, without = (pt.simulate(PLAIN, strategy, 4, steps=STEPS, ema=ema) for ema in (DECAY, None))
    shards = [shard for shard in kept if shard._average is not None]
    net = plain()
    flat = torch.cat([parameter.detach().view(-1) for parameter in net.parameters()])
    for shard in shards:
        assert shard._average is not None
        torch.testing.assert_close(shard._average.present, averages[id(shard)], rtol=0, atol=1e-12)
        place_(flat, spans[id(shard)], averages[id(shard)])
    nn.utils.vector_to_parameters(flat, net.parameters())
    assert loss_of(net) == pytest.approx(with_average.loss, abs=1e-12)
    same = ("parameters_sha256", "trace_hash", "seconds", "train_loss")
    assert [getattr(with_average, name) for name in same] == [getattr(without, name) for name in same]
    assert with_average.loss != without.loss


@pytest.mark.parametrize("strategy", [s.downpour(shards=2), s.local_sgd(period=4), s.sync_sgd()], ids=str)
def test_the_average_is_read_from_a_run(strategy: pt.Strategy, tmp_path: Path) -> None:
    found = pt.simulate(PLAIN, strategy, 2, steps=STEPS, ema=DECAY, out=tmp_path, checkpoint_every=STEPS)
    net = plain()
    net.load_state_dict(pt.training.checkpoint_model(tmp_path, average=True))
    assert loss_of(net) == pytest.approx(found.loss, abs=1e-12)
    net.load_state_dict(pt.training.checkpoint_model(tmp_path))
    assert loss_of(net) != pytest.approx(found.loss, abs=1e-9)
    pt.simulate(PLAIN, strategy, 2, steps=STEPS, out=tmp_path / "without", checkpoint_every=STEPS)
    with pytest.raises(ValueError, match="has no moving average of the weights"):
        pt.training.checkpoint_model(tmp_path / "without", average=True)


@pytest.mark.process
def test_a_run_that_is_resumed_and_replayed_has_the_same_averages(tmp_path: Path) -> None:
    """The scores of processes are the replay's, to the bit: rows about tests are compared there."""
    strategy = s.async_sgd(shards=2, replicas=1)
    pt.run(PLAIN, strategy, 2, steps=4, ema=DECAY, out=tmp_path, threads=1)
    pt.run(PLAIN, strategy, 2, steps=STEPS * 2, ema=DECAY, out=tmp_path, threads=1, resume=True)
    again = replay(tmp_path, PLAIN, strategy)
    assert again.same, again.difference


def test_one_worker_that_is_resumed_has_the_average_of_a_run_without_a_pause(tmp_path: Path) -> None:
    straight = pt.run(PLAIN, s.async_sgd(), 1, steps=8, ema=DECAY, threads=1)
    pt.run(PLAIN, s.async_sgd(), 1, steps=5, ema=DECAY, out=tmp_path, threads=1)
    found = pt.run(PLAIN, s.async_sgd(), 1, steps=8, ema=DECAY, out=tmp_path, threads=1, resume=True)
    assert (found.loss, found.parameters_sha256) == (straight.loss, straight.parameters_sha256)


def test_rows_of_tables_have_no_average() -> None:
    words = torch.randint(6, (32, 6), generator=torch.Generator().manual_seed(1))
    set_ = TensorDataset(words, words[:, 0] % 2)
    job = replace(
        PLAIN,
        model=lambda: nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Flatten(), nn.Linear(18, 2)).double(),
        data=lambda path: pt.Data(set_, set_),
    )
    with pytest.raises(Incompatible, match=r"PT1610.*0\.weight"):
        pt.simulate(job, s.async_sgd(), 2, steps=2, ema=DECAY)
