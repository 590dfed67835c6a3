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
from polytempo.training.step import pace_store, pace_watch
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
    """Time passes with steps, and snapshots come every three steps, at any cost."""

    def after_step(self: PaceWatch, step: int) -> None:
        self._clock.steps = step  # type: ignore[attr-defined]
        real(self, step)

    real = PaceWatch.after_step
    monkeypatch.setattr(pace_store, "ProcessClock", MadeClock)
    monkeypatch.setattr(pace_watch, "MAX_COST", 1e9)
    monkeypatch.setattr(PaceWatch, "after_step", after_step)


@pytest.mark.parametrize(
    ("strategy", "steps"), [(s.sync_sgd(), 20), (s.shared_memory(), 20), (s.local_sgd(period=4), 30)], ids=str
)
def test_attach_names_the_slow_rank(strategy: Strategy, steps: int, made_clocks: None) -> None:
    """Rank 2 becomes slow in step 13. Between meetings ranks leave their snapshots at other times."""

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
    assert abs(found["values"]["since_step"] - 12) <= 3
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


def test_a_store_that_is_gone_ends_the_comparison_and_not_the_run() -> None:
    class Gone:
        def put(self, *_: Any) -> None:
            raise RuntimeError("connection reset by peer")

        read = ask = asked = put

    class Clock:
        def now_s(self) -> float:
            return 0.0

        busy_s = waited_s = now_s

    watch = PaceWatch(Gone(), Clock(), 0, 2)
    watch.after_step(3)
    watch.after_step(6)
    assert watch.told == []
