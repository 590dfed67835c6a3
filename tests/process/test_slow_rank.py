"""Real ranks leave their seconds in the group's store, and rank 0 names the slow one. The clocks are made, so that the
outcome does not depend on this machine's other work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.core import Strategy
from polytempo.report.status.records import Diagnosis
from polytempo.report.status.stream import stream
from polytempo.training.step import pace_store
from polytempo.training.step.pace_watch import PaceWatch
from polytempo.worlds import ProcessWorld
from process.crew import batches, mine, small, together
from virtual.test_slow_rank import job

pytestmark = pytest.mark.process

s = pt.strategies
SLOW = 2


class MadeClock:
    """Busy for 0.1 s a step, rank 2 for 0.13 s from step 12 on; the others wait for it."""

    def __init__(self, world: ProcessWorld) -> None:
        self._world, self.steps = world, 0

    def now_s(self) -> float:
        return 0.1 * self.steps + 0.03 * max(0, self.steps - 12)

    def busy_s(self) -> float:
        return self.now_s() if self._world.rank == SLOW else 0.1 * self.steps

    def waited_s(self) -> float:
        return self.now_s() - self.busy_s()


@pytest.fixture
def made_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes with steps, and the program itself leaves a snapshot every three steps."""

    def after_step(self: PaceWatch, step: int) -> None:
        self._clock.steps = step  # type: ignore[attr-defined]
        real(self, step)

    real = PaceWatch.after_step
    monkeypatch.setattr(pace_store, "ProcessClock", MadeClock)
    monkeypatch.setattr(pace_store, "BEHIND", False)
    monkeypatch.setattr(PaceWatch, "after_step", after_step)


@pytest.mark.parametrize(
    ("strategy", "steps"), [(s.sync_sgd(), 20), (s.shared_memory(), 20), (s.local_sgd(period=4), 30)], ids=str
)
def test_attach_names_the_slow_rank(strategy: Strategy, steps: int, made_clocks: None) -> None:
    """Rank 2 becomes slow in step 13. Snapshots follow steps 1, 4, 7, 10 and 13. Rank 0 compares after step 11, when
    the last snapshot of a rank between two meetings may have followed step 7."""

    def trained(world: ProcessWorld) -> Any:
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = pt.attach(model, optimizer, strategy)
        for inputs, targets in mine(batches(48), world):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        handle.detach()
        return handle.diagnoses

    first, *others = together(4, trained)
    assert others == [[], [], []]
    [found] = first
    assert (found["rank"], found["who"], found["about"]) == (SLOW, "rank-2", "slow rank")
    assert 7 <= found["values"]["since_step"] <= 15
    assert found["step"] <= 12 + steps
    assert found["values"]["slower"] == pytest.approx(0.3, abs=0.08)
    assert found["text"].startswith("rank 2 is ")


def test_a_job_writes_the_diagnosis_into_its_rows(made_clocks: None, tmp_path: Path) -> None:
    def trained(world: ProcessWorld) -> Any:
        pt.Trainer(job(), s.sync_sgd(), world=world, steps=60, out=tmp_path / "run").fit()
        return None

    together(4, trained)
    [found] = [each for each in stream(tmp_path / "run") if isinstance(each, Diagnosis)]
    assert (found.rank, found.about) == (SLOW, "slow rank")


def test_a_slow_stage_is_named(made_clocks: None, tmp_path: Path) -> None:
    def trained(world: ProcessWorld) -> Any:
        pt.Trainer(job(), s.gpipe(stages=3), world=world, steps=60, out=tmp_path / "run").fit()
        return None

    together(3, trained)
    [found] = [each for each in stream(tmp_path / "run") if isinstance(each, Diagnosis)]
    assert found.text.startswith("stage 2 (rank 2) is ")


@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.local_sgd(period=4), s.gossip()], ids=str)
def test_a_compared_run_has_the_bits_of_one_that_is_not(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def trained(world: ProcessWorld) -> Any:
        found = []
        for most, threads in ((1024, True), (0, True), (1024, False)):
            pace_store._MOST_RANKS, pace_store.BEHIND = most, threads
            result = pt.Trainer(job(), strategy, world=world, steps=40, out=tmp_path / f"{most} {threads}").fit()
            found.append([result.parameters_sha256, result.trace_hash, result.train_loss, result.bytes_sent_per_rank])
        return found

    for found in together(2, trained):
        assert found[1] == found[0] == found[2]
