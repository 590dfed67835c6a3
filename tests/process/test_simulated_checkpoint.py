"""A simulation's checkpoint is one of a real run: real processes go on from it to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import polytempo as pt
from polytempo.core import Strategy
from polytempo.engines.processes.worker import Result
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.worlds import ProcessWorld
from process.crew import together
from process.test_resume import job

pytestmark = pytest.mark.process

s, ring = pt.strategies, pt.collectives.ring


@pytest.mark.parametrize(
    "strategy",
    [
        s.sync_sgd(ring),
        s.delayed_sgd(delay=3, route=ring),
        s.local_sgd(period=4, route=ring),
        s.diloco(period=4, route=ring),
        s.gossip(),
        s.one_bit_sgd(exact_below=4),
    ],
    ids=str,
)
def test_real_processes_go_on_from_a_simulation(strategy: Strategy, tmp_path: Path) -> None:
    """The stop is at step 14, an epoch's second step; `delayed_sgd` has three exchanges under way there, which a
    save leaves."""
    straight = pt.simulate(job(), strategy, 2, steps=20, threads=1)
    pt.simulate(job(), strategy, 2, steps=15, out=tmp_path, checkpoint_every=14)
    newest = latest(tmp_path / "checkpoint")
    assert newest is not None
    assert newest.name == "step-00000015", "the last step is saved, too"
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()

    def resumed(world: ProcessWorld) -> Result:
        result = pt.Trainer(job(), strategy, world=world, steps=20, out=tmp_path, resume=True).fit()
        return [result.parameters_sha256, result.steps, result.samples]

    for found in together(2, resumed):
        assert found == [straight.parameters_sha256, straight.steps, straight.samples]
