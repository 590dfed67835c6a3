"""Starts from another run on real processes: interrupted, resumed, replayed, with a server, elastic."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from laws.test_warm_start import PLAIN, loaded, loss_of, plain
from polytempo.core.calls.refusals import Incompatible
from polytempo.replay.replay import replay
from polytempo.spec.result import Result

pytestmark = pytest.mark.process

s = pt.strategies


def run(strategy: Any, steps: int, out: Path | None = None, **options: Any) -> Result:
    return pt.run(PLAIN, strategy, 2, steps=steps, out=out, threads=1, **options)


def test_a_chain_has_the_bits_of_the_other_world_and_is_resumed_where_it_stopped(tmp_path: Path) -> None:
    chain = pt.then(s.local_sgd(period=3), 4, s.sync_sgd())
    expected = pt.simulate(PLAIN, chain, 2, steps=5, threads=1)
    out = tmp_path / "chain"
    run(chain, 2, out)
    [first] = out.glob("01-*")
    before = json.loads((first / "result.json").read_text())
    assert (before["steps"], before["strategy"]) == (4, str(s.local_sgd(period=3)))
    shutil.rmtree(first)  # the second run has all that it needs
    found = run(chain, 5, out, resume=True)
    assert (found.parameters_sha256, found.loss) == (expected.parameters_sha256, expected.loss)
    assert (found.resumed_at, found.started_from) == (2, expected.started_from)
    assert not first.exists()


def test_a_chain_that_stopped_in_its_first_run_goes_on_there(tmp_path: Path) -> None:
    chain = pt.then(s.local_sgd(period=3), 4, s.sync_sgd())
    first = tmp_path / "01-local_sgd-period-3-route-native"
    run(s.local_sgd(period=3), 2, first)
    found = run(chain, 3, tmp_path, resume=True)
    assert json.loads((first / "result.json").read_text())["resumed_at"] == 2
    assert found.parameters_sha256 == pt.simulate(PLAIN, chain, 2, steps=3, threads=1).parameters_sha256


def test_shards_begin_with_a_start_and_a_replay_repeats_it(tmp_path: Path) -> None:
    """The folder is moved, and the first run is gone: the run's own copy is enough."""
    run(s.sync_sgd(), 3, tmp_path / "first")
    served = run(s.async_sgd(shards=2), 4, tmp_path / "second", start_from=tmp_path / "first")
    run(s.async_sgd(shards=2), 6, tmp_path / "second", resume=True)
    shutil.rmtree(tmp_path / "first")
    moved = (tmp_path / "second").rename(tmp_path / "moved")
    again = replay(moved, PLAIN, s.async_sgd(shards=2))
    assert again.same, again.difference
    assert served.started_from is not None
    assert served.started_from["run"] == "first"
    found = run(s.sync_sgd(), 1, start_from=moved)
    by_hand = pt.run(
        pt.Job(**{**vars(PLAIN), "model": partial(loaded, plain, pt.training.checkpoint_model(moved))}),
        *(s.sync_sgd(), 2),
        steps=1,
        threads=1,
    )
    assert found.parameters_sha256 == by_hand.parameters_sha256


@pytest.mark.parametrize("strategy", ["downpour(shards=2)", "hogwild()", "easgd()"])
def test_the_last_model_of_workers_that_do_not_wait(strategy: str, tmp_path: Path) -> None:
    """With a server it is the scored one; of Hogwild!, the copy as it was when each worker had done its last step."""
    found = run(strategy, 6, tmp_path)
    loss = loss_of(loaded(plain, pt.training.checkpoint_model(tmp_path)))
    if strategy != "hogwild()":
        assert loss == pytest.approx(found.loss, abs=1e-9)
    second = run("sync_sgd()", 1, start_from=tmp_path)
    assert second.started_from is not None
    assert second.started_from["step"] == 6


def test_an_elastic_run_and_a_trainer_begin_with_a_start(tmp_path: Path) -> None:
    run(s.sync_sgd(), 3, tmp_path / "first")
    straight = run(s.sync_sgd(), 2, start_from=tmp_path / "first")
    elastic = run(s.sync_sgd(), 2, min_workers=1, start_from=tmp_path / "first")
    assert elastic.parameters_sha256 == straight.parameters_sha256
    assert elastic.started_from == straight.started_from
    trained = pt.Trainer(PLAIN, s.sync_sgd(), steps=2, start_from=tmp_path / "first").fit()
    alone = pt.simulate(PLAIN, s.sync_sgd(), 1, steps=2, start_from=tmp_path / "first")
    assert trained.parameters_sha256 == alone.parameters_sha256


def test_a_resumed_run_takes_no_other_start(tmp_path: Path) -> None:
    run(s.sync_sgd(), 2, tmp_path / "first")
    run(s.sync_sgd(), 2, tmp_path / "plain")
    with pytest.raises(Incompatible, match="PT2003"):
        run(s.sync_sgd(), 4, tmp_path / "plain", resume=True, start_from=tmp_path / "first")
    run(s.sync_sgd(), 2, tmp_path / "second", start_from=tmp_path / "first")
    assert run(s.sync_sgd(), 3, tmp_path / "second", resume=True, start_from=tmp_path / "first").steps == 3
    with pytest.raises(Incompatible, match="PT2003"):
        run(s.sync_sgd(), 4, tmp_path / "second", resume=True, start_from=tmp_path / "plain")
