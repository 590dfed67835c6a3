"""The stream of runs on processes: each kind of run tells its start, its checkpoints and its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.jobs import find
from polytempo.report.status.records import CheckpointSaved, RunFinished, RunStarted
from polytempo.report.status.stream import stream
from polytempo.worlds import ProcessWorld
from process.crew import together


def test_a_trainer_without_a_launcher_tells_its_start_and_its_end(tmp_path: Path) -> None:
    def work(world: ProcessWorld) -> None:
        for steps in (2, 3):
            pt.Trainer(find("digits"), world=world, steps=steps, out=tmp_path, resume=steps == 3).fit()

    together(2, work)
    starts = [(record.workers, record.resumed) for record in stream(tmp_path) if isinstance(record, RunStarted)]
    ends = [record for record in stream(tmp_path) if isinstance(record, RunFinished)]
    assert (starts, ends) == ([(2, None), (2, True)], [RunFinished(state="finished")] * 2)


KINDS: dict[str, tuple[pt.Strategy, dict[str, Any]]] = {
    "collective": (pt.strategies.sync_sgd(), {}),
    "on its own": (pt.strategies.hogwild(), {}),
    "pipeline": (pt.strategies.gpipe(stages=2), {}),
    "elastic": (pt.strategies.sync_sgd(), {"min_workers": 1}),
    "served": (pt.strategies.async_sgd(), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_run_tells_its_checkpoints(kind: str, tmp_path: Path) -> None:
    strategy, more = KINDS[kind]
    pt.run(find("digits"), strategy, 2, steps=8, checkpoint_every=4, out=tmp_path, **more)
    records = stream(tmp_path)
    assert (type(records[0]), records[-1]) == (RunStarted, RunFinished(state="finished"))
    saved = [record for record in records if isinstance(record, CheckpointSaved)]
    assert [record.step for record in saved] == sorted({record.step for record in saved}) != []
    assert kind == "served" or [record.step for record in saved] == [4, 8]
    assert all((tmp_path / record.path).exists() for record in saved[-2:])


def test_a_simulation_tells_its_checkpoints(tmp_path: Path) -> None:
    pt.simulate(find("digits"), pt.strategies.sync_sgd(), 2, steps=8, checkpoint_every=4, out=tmp_path)
    saved = [(r.step, r.path) for r in stream(tmp_path) if isinstance(r, CheckpointSaved)]
    assert saved == [(4, "checkpoint/step-00000004"), (8, "checkpoint/step-00000008")]
