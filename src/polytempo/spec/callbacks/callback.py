"""`Callback`: functions of one's own that are called while a run goes on. They read facts and answer with a `Control`.

start ─ step ─ step ─ evaluation ─ checkpoint ─ step … ─ finish      CallbackFacts in, Control(stop, save, evaluate) out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

HOOKS = ("on_start", "on_step", "on_evaluation", "on_checkpoint", "on_fault", "on_finish")


class Control(NamedTuple):
    """Requests of a callback to the run; all ranks follow them after the same step."""

    stop: bool = False
    """End the run, as if `steps` had said so."""
    save: bool = False
    """Save a checkpoint. Nothing without `out`."""
    evaluate: bool = False
    """Evaluate the model on the test set. Nothing without one."""

    def joined(self, other: Control) -> Control:
        """The requests of both."""
        return Control(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True)
class CallbackFacts:
    """A moment of a run as rank 0 sees it, or the launcher with a parameter server. Nothing in it can be changed."""

    step: int = 0
    """Steps so far, over all ranks and earlier parts of the run."""
    epoch: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    """Training time so far; virtual in a simulation."""
    values: Mapping[str, float | None] = field(default_factory=dict)
    """Numbers: `loss`, `accuracy` and the job's metrics at an evaluation, else entries of the last row of training."""
    out: str | None = None
    """The run's folder."""
    checkpoint: str | None = None
    """Folder of the complete checkpoint, at `on_checkpoint`."""
    fault: str = ""
    """The event in words, at `on_fault`."""
    status: str = "running"
    """State of the run; at `on_finish` "finished" or "failed"."""


class Callback:
    """A base with six calls that do nothing; a callback overrides the calls that it needs.

        class Stopper(pt.callbacks.Callback):
            def on_evaluation(self, facts):
                return pt.callbacks.Control(stop=facts.values["loss"] < 0.1)

    Rank 0 calls it, in the run's process. An exception ends the run with the callback's name. Where a run saves
    checkpoints, `state_dict` is a part of them, and `load_state_dict` gets it after a resume; an object with numbers of
    its own begins at zero in `on_start`.
    """

    text: str = ""
    """The call that makes the callback, as on the command line; "": it has none."""
    needs: frozenset[str] = frozenset()
    """Features of a run that it needs; see the table of refusals."""
    measures: tuple[str, ...] = ()
    """Numbers of an evaluation that it reads; a job with other scores is refused before the run."""

    def on_start(self, facts: CallbackFacts) -> Control | None:
        """The run begins, or goes on after a resume."""

    def on_step(self, facts: CallbackFacts) -> Control | None:
        """A step of rank 0 is done; with a parameter server a row of training has come."""

    def on_evaluation(self, facts: CallbackFacts) -> Control | None:
        """The model was evaluated on the test set."""

    def on_checkpoint(self, facts: CallbackFacts) -> Control | None:
        """A checkpoint is complete."""

    def on_fault(self, facts: CallbackFacts) -> Control | None:
        """A process was lost, or an error ends the run."""

    def on_finish(self, facts: CallbackFacts) -> None:
        """The run is over."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts that the callback goes on with after a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""

    def __str__(self) -> str:
        return self.text or type(self).__name__


def overrides(callback: Callback, hook: str) -> bool:
    """True if the callback has a call of its own of that name."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)
