"""`export`: writes the models of the best evaluations, and of each n-th one, as safetensors files.

evaluation ── is among them ──▶ Control(save) ──▶ checkpoint is complete ──▶ OUT/exports/step-40.safetensors
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from string import Formatter
from typing import Any

from polytempo.spec.callbacks.callback import Callback, CallbackFacts, Control
from polytempo.spec.callbacks.early_stop import is_better_small, value_of
from polytempo.spec.callbacks.keep import Keep

_POSITION = {"step", "epoch"}


class Export(Callback):
    """See `export`."""

    needs = frozenset({"kept checkpoints"})

    def __init__(self, best: int, every: int, metric: str, better: str, to: str) -> None:
        if best < 0 or every < 0 or best + every == 0:
            raise ValueError(f"best={best} and every={every} are numbers of evaluations, and one is above 0")
        fields = {name for _, name, _, _ in Formatter().parse(to) if name is not None}
        if "step" not in fields or not to.endswith(".safetensors"):
            raise ValueError(
                f"to={to!r} must have {{step}} in it and end in .safetensors, so that each file has a name"
            )
        is_better_small(metric, better)  # ValueError for another word, also where `best` is 0
        self.every, self.to = every, to
        self._best = Keep(best, 0, metric, better) if best else None
        self.measures = tuple(sorted(fields - _POSITION | ({metric} if best else set())))
        self.text = f"export(best={best}, every={every}, metric={metric!r}, better={better}, to={to!r})"
        self._begin()
        try:
            self._name(0, [0.0] * (1 + len(self.measures)))
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"to={to!r} makes no name of the numbers 0 ({type(error).__name__}: {error}); write fields such as "
                "{step}, {epoch:.1f} and {accuracy:.3f}"
            ) from error

    def _begin(self) -> None:
        self.evaluations = 0
        self.numbers: dict[int, list[float]] = {}
        """Epoch and `measures` of each step that was exported, or will be when its checkpoint is complete."""
        self.regular: list[int] = []
        """The steps of each n-th evaluation: their files stay."""
        self._noted = False

    def _name(self, step: int, numbers: list[float]) -> str:
        epoch, *values = numbers
        return self.to.format(step=step, epoch=epoch, **dict(zip(self.measures, values, strict=True)))

    def on_start(self, facts: CallbackFacts) -> None:
        """Begin without files; a resume brings them. ValueError where the folder of the files cannot be written."""
        self._begin()
        if self._best is not None:
            self._best.on_start(facts)
        if facts.out is None:
            return
        files: Any = import_module("polytempo.core.system.files")  # it loads torch
        folder = Path(facts.out) / self.to.partition("{")[0].rpartition("/")[0]
        try:
            files.made(folder)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        except OSError as error:
            raise ValueError(f"to={self.to!r}: {files.problem(error, folder)}") from error

    def on_evaluation(self, facts: CallbackFacts) -> Control:
        """Ask for a checkpoint of a model that will be exported."""
        self.evaluations += 1
        if regular := self.every > 0 and self.evaluations % self.every == 0:
            self.regular.append(facts.step)
        best = self._best is not None and self._best.on_evaluation(facts).save
        if regular or best:
            self.numbers[facts.step] = [float(facts.epoch), *(value_of(self, name, facts) for name in self.measures)]
        return Control(save=regular or best)

    def on_checkpoint(self, facts: CallbackFacts) -> None:
        """Write the files of this step and of earlier ones without a file; remove files of steps that fell behind."""
        assert facts.checkpoint is not None
        assert facts.out is not None
        write: Any = import_module("polytempo.training.observe.whole_checkpoint").export_checkpoint
        files: Any = import_module("polytempo.core.system.files")
        stay = {*self.regular, *({} if self._best is None else self._best.scores)}
        for step, numbers in [*self.numbers.items()]:
            saved = Path(facts.checkpoint).with_name(f"step-{step:08d}")
            file = Path(facts.out) / self._name(step, numbers)
            try:
                if step not in stay:
                    del self.numbers[step]
                    file.unlink(missing_ok=True)
                elif step == facts.step or (saved.is_dir() and not file.exists()):
                    write(saved, file)
            except OSError as error:
                self._note(f"{file} is not written or removed: {files.problem(error, file)}")

    def _note(self, text: str) -> None:
        if not self._noted:
            self._noted = True
            with suppress(OSError):  # the log may be on the same disk
                print(f"note: callback {self}: {text}; the run goes on", file=sys.stderr, flush=True)

    def state_dict(self) -> dict[str, Any]:
        """The number of evaluations, steps with their numbers, and the best scores."""
        best = {} if self._best is None else self._best.state_dict()
        numbers = [[step, *map(str, each)] for step, each in self.numbers.items()]  # as text: JSON has no NaN
        return {"evaluations": self.evaluations, "numbers": numbers, "regular": self.regular, **best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. It has numbers alone: `to` makes the names of files."""
        self.evaluations, self.regular = int(state["evaluations"]), [int(step) for step in state["regular"]]
        self.numbers = {int(step): [float(each) for each in numbers] for step, *numbers in state["numbers"]}
        if self._best is not None:
            self._best.load_state_dict(state)


def export(
    best: int = 1,
    every: int = 0,
    metric: str = "loss",
    better: str = "auto",
    to: str = "exports/step-{step}.safetensors",
) -> Export:
    """Write the models of the `best` evaluations, and of each evaluation number `every`, 2 `every`, …, as safetensors.

        best = pt.callbacks.export(metric="accuracy", to="exports/{step}-{accuracy:.3f}.safetensors")
        pt.run(job, "gpipe(stages=2)", 2, epochs=100, out="runs/a", callbacks=[best])

    A file has the whole model by its own names, as `pt.training.checkpoint_model` reads it, and where the run has `ema`
    the average that was scored. `to`: its place in the run's folder, or an absolute path, with the fields step, epoch
    and numbers of the evaluation. A file is removed when its model is not among the best any more. `better`: as in
    `early_stop`.

    Cost: for each file a checkpoint is written and read again by rank 0, in memory for two models.

    Where a file cannot be written later, the run goes on with a note.

    Errors: ValueError for a `to` without {step}, and for a folder that cannot be written when the run begins;
    `Incompatible` as in `keep`, and for two of them with one `to` (PT2310).
    """
    return Export(best, every, metric, better, to)
