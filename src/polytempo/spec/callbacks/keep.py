"""`keep`: keeps the best and the last checkpoints, beside the newest two that every run keeps.

OUT/checkpoint/step-00000040 ──linked when it is complete──▶ OUT/kept/checkpoint/step-00000040
"""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

from polytempo.spec.callbacks.callback import Callback, CallbackFacts, Control
from polytempo.spec.callbacks.early_stop import is_better_small, value_of

_STEP = re.compile(r"step-(\d{8,})")


class Keep(Callback):
    """See `keep`."""

    needs = frozenset({"kept checkpoints"})

    def __init__(self, best: int, last: int, metric: str, better: str) -> None:
        if best < 0 or last < 0 or best + last == 0:
            raise ValueError(f"best={best} and last={last} are numbers of checkpoints to keep, and one is above 0")
        self.best, self.last, self.metric = best, last, metric
        self.measures = (metric,) if best else ()
        self._sign = 1.0 if is_better_small(metric, better) else -1.0
        self.text = f"keep(best={best}, last={last}, metric={metric!r}, better={better})"
        self.scores: dict[int, float] = {}
        """The metric by step, of all steps with an evaluation among the best."""

    def on_start(self, facts: CallbackFacts) -> None:
        """Begin without scores; a resume brings them."""
        self.scores = {}

    def on_evaluation(self, facts: CallbackFacts) -> Control:
        """Ask for a checkpoint of a model that is among the best."""
        if not self.best:
            return Control()
        value = value_of(self, self.metric, facts)
        if math.isnan(value):
            return Control()
        self.scores[facts.step] = value
        self.scores = dict(sorted(self.scores.items(), key=lambda item: (self._sign * item[1], item[0]))[: self.best])
        return Control(save=facts.step in self.scores)

    def on_checkpoint(self, facts: CallbackFacts) -> None:
        """Keep the new checkpoint, and remove checkpoints that are neither among the best nor the last."""
        assert facts.checkpoint is not None
        source = Path(facts.checkpoint)
        kept = source.parent.parent / "kept" / "checkpoint"
        _link(source, kept / source.name)
        self._prune(kept)

    def on_finish(self, facts: CallbackFacts) -> None:
        """Remove checkpoints that the final evaluation has put behind others."""
        if facts.out is not None and (kept := Path(facts.out) / "kept" / "checkpoint").is_dir():
            self._prune(kept)

    def _prune(self, kept: Path) -> None:
        steps = sorted(int(match[1]) for entry in kept.iterdir() if (match := _STEP.fullmatch(entry.name)))
        stay = {*steps[len(steps) - self.last :], *self.scores}
        for step in set(steps) - stay:
            shutil.rmtree(kept / f"step-{step:08d}")

    def state_dict(self) -> dict[str, Any]:
        """The best scores."""
        return {"scores": [[step, value] for step, value in self.scores.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.scores = {int(step): float(value) for step, value in state["scores"]}


def keep(best: int = 1, last: int = 0, metric: str = "loss", better: str = "auto") -> Keep:
    """Keep the checkpoints of the `best` evaluations, and the `last` checkpoints, in `OUT/kept`.

        pt.run(job, "sync_sgd", epochs=100, out="runs/a", callbacks=[pt.callbacks.keep(best=3, metric="accuracy")])

    An evaluation among the best so far asks for a checkpoint of its step. `OUT/kept` reads as a run's folder:
    `start_from="runs/a/kept@400"` and `pt.checkpoint_model`. Files are linked where the filesystem can, so a checkpoint
    that is in both places is on the disk once. `better`: as in `early_stop`.

    Errors: `Incompatible` without `out` (PT2301), with a parameter server (PT2302) and with a URL (PT2303).
    """
    return Keep(best, last, metric, better)


def _link(source: Path, target: Path) -> None:
    """The folder `source` once more, complete or not at all."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in source.iterdir():
        try:
            os.link(file, partial / file.name, follow_symlinks=False)
        except OSError:
            shutil.copy2(file, partial / file.name, follow_symlinks=False)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
