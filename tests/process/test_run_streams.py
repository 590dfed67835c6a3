"""The stream of runs on processes: each kind of run tells its start, its checkpoints and its end."""

from __future__ import annotations

from pathlib import Path

import polytempo as pt
from polytempo.jobs import find
from polytempo.report.status.records import RunFinished, RunStarted
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
