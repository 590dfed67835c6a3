"""A run in TensorBoard, and in a tracker of your own.

    python examples/tracked_run.py

The same from the command line, in a folder that stays:

    polytempo train digits --out runs/first --track tensorboard
    tensorboard --logdir runs
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import polytempo as pt
from polytempo.report.status.records import RunFinished, StreamRecord


class BestLoss:
    """The lowest loss of a run, and its step."""

    def start(self, facts: pt.trackers.TrackedRun) -> None:
        """Begin."""
        self.best, self.at = float("inf"), 0

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Compare."""
        if row.get("test/loss", self.best) < self.best:
            self.best, self.at = row["test/loss"], step

    def event(self, event: StreamRecord) -> None:
        """A fault, a checkpoint, a group: nothing here."""

    def finish(self, status: RunFinished) -> None:
        """Tell."""
        print(f"{status.state}: the lowest test loss is {self.best:.3f}, at step {self.at}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # a folder of your own stays: out="runs/first"
        trackers = [pt.trackers.tensorboard(), BestLoss()]
        pt.run(
            "digits", pt.strategies.local_sgd(period=8), workers=2, epochs=3, out=f"{folder}/first", trackers=trackers
        )
        print("tensorboard --logdir runs shows", *(file.name for file in Path(folder).glob("first/tensorboard/*")))
