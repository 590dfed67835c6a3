"""`CallbackHost`: calls a run's callbacks with facts, and holds their requests until the ranks take them.

rank 0   step ─▶ on_step ─▶ requests ──┐ carried by an exchange that is made anyway: the look for SIGTERM, a score's
others                                 └─▶ or a checkpoint's meeting, a commit point ─▶ all follow after the same step
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from polytempo.core import Port
from polytempo.core.errors import JobFailed
from polytempo.spec.callbacks.callback import HOOKS, Callback, CallbackFacts, Control, overrides
from polytempo.spec.callbacks.reading import Callbacks, callbacks_of
from polytempo.spec.job import OF_ROWS
from polytempo.spec.result import Result
from polytempo.spec.run_options import RunOptions
from polytempo.training.model.agree import gather_json

Recorder = Callable[[dict[str, Any]], None]
_OF_TESTS = ("loss", "accuracy")
_PASSING = frozenset({"checkpoint", "fault", "values"})
"""Facts of one call alone."""
_NOTHING = Control()
"""The answer of a callback that asks for nothing."""


class CallbackHost:
    """The callbacks of one run. All ranks have one; rank 0 alone calls `started` to `finished`."""

    def __init__(self, callbacks: Callbacks, out: str | None) -> None:
        self._hooks = {hook: [each for each in callbacks if overrides(each, hook)] for hook in HOOKS}
        self._callbacks, self._wish = callbacks, Control()
        self._facts = CallbackFacts(out=out)
        self._restored: str | None = None
        self._evaluated = -1
        """The step of the last evaluation."""
        self._stopped: dict[int, int] = {}
        """The step of a callback's request to stop, by its place."""

    @property
    def sees_steps(self) -> bool:
        """True if a callback has `on_step`."""
        return bool(self._hooks["on_step"])

    # ------------------------------------------------------------------ moments of a run

    @contextmanager
    def running(self, record: Recorder, step: int = 0) -> Iterator[Recorder]:
        """Inside, the run goes on from `step`; yields `record` with the calls that rows are due to."""
        self.started(step)
        try:
            yield self.recording(record)
        except BaseException as error:
            self.finished(error)
            raise
        self.finished()

    def started(self, step: int = 0) -> None:
        """The run begins or goes on; states of a resumed run come to their callbacks."""
        self._call("on_start", step=step)
        if self._restored is not None:
            self.restore(self._restored)

    def stepped(self, step: int, epoch: float, samples: int, seconds: float) -> None:
        """A step is done."""
        self._call("on_step", step=step, epoch=epoch, samples=samples, seconds=seconds)

    def recording(self, record: Recorder) -> Recorder:
        """`record`, with the calls that a row is due to."""

        def recorded(row: dict[str, Any]) -> None:
            record(row)
            self.take_row(row)

        return recorded

    def take_row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics has come."""
        if row["kind"] not in ("train", "test", "checkpoint"):
            return None
        if row["kind"] == "checkpoint":
            folder = row["path"] if self._facts.out is None else f"{self._facts.out}/{row['path']}"
            return self._call("on_checkpoint", step=row["step"], checkpoint=folder)
        position = {name: row[name] for name in ("step", "epoch", "samples", "seconds")}
        if row["kind"] == "test":
            if self._evaluated == row["step"]:  # the final model was evaluated before
                return
            self._evaluated = row["step"]
            values = {name: row.get(name) for name in _OF_TESTS}
            values |= {name: value for name, value in row.items() if name not in OF_ROWS}
            self.evaluated(values, **position)
        else:
            self._facts = replace(self._facts, values={n: v for n, v in row.items() if n not in ("kind", *position)})

    def evaluated(self, values: Mapping[str, float | None], **position: Any) -> None:
        """The model was evaluated."""
        self._call("on_evaluation", values=values, **position)

    def faulted(self, fault: str) -> None:
        """A process was lost, or an error ends the run."""
        self._call("on_fault", fault=fault)

    def finished(self, error: BaseException | None = None) -> None:
        """The run is over. After an error a callback's own error is a note, for the first one counts."""
        if error is None:
            self._call("on_finish", status="finished")
            return
        try:
            if isinstance(error, Exception):
                self.faulted(f"{type(error).__name__}: {error}")
            self._call("on_finish", status="failed")
        except JobFailed as another:
            print(f"note: {another}", file=sys.stderr)

    def _call(self, hook: str, **facts: Any) -> None:
        lasting = {name: value for name, value in facts.items() if name not in _PASSING}
        seen = replace(self._facts, **facts)
        self._facts = seen if len(lasting) == len(facts) else replace(self._facts, **lasting)
        for each in self._hooks[hook]:
            control = _called(each, hook, seen)
            if control is _NOTHING:  # as in nearly all steps
                continue
            if control.stop:
                self._stopped.setdefault(self._callbacks.index(each), seen.step)
            self._wish = self._wish.joined(control)

    # ------------------------------------------------------------------ requests and states

    def take(self) -> Control:
        """The requests since the last call."""
        wish, self._wish = self._wish, Control()
        return wish

    def report(self) -> list[dict[str, Any]]:
        """`Result.callbacks`."""
        return [
            {"callback": str(each), "asked_to_stop_at": self._stopped.get(place), "state": _state_of(each)}
            for place, each in enumerate(self._callbacks)
        ]

    def state(self) -> str:
        """The callbacks' states, for a checkpoint or another rank."""
        return json.dumps([[str(each), _state_of(each)] for each in self._callbacks])

    def restore(self, state: str) -> None:
        """Take over `state`, callback by callback; callbacks that are new begin afresh."""
        self._restored = state
        saved = dict(json.loads(state))
        for each in self._callbacks:
            if saved.get(str(each)):
                each.load_state_dict(saved[str(each)])

    async def agreed(self, port: Port) -> Control:
        """Rank 0's requests and states, on all ranks, which meet here anyway."""
        told = [list(self.take()), self.state()] if port.rank == 0 else None
        wish, state = (await gather_json(port, told))[0]
        if port.rank:
            self.restore(state)
        return Control(*wish)


def host_of(options: RunOptions) -> CallbackHost | None:
    """The host of the options' callbacks; None without any."""
    found = callbacks_of(options.callbacks)
    return CallbackHost(found, None if options.out is None else str(options.out)) if found else None


def _called(callback: Callback, hook: str, facts: CallbackFacts) -> Control:
    """The callback's requests. `JobFailed` names it where it raises, or returns something else."""
    try:
        found = getattr(callback, hook)(facts)
    except Exception as error:
        raise JobFailed(f"callback {callback}: {hook} raised {type(error).__name__}: {error}") from error
    if found is None:
        return _NOTHING
    if not isinstance(found, Control):
        raise JobFailed(f"callback {callback}: {hook} returned {found!r}; expected None or pt.callbacks.Control")
    return found


def _state_of(callback: Callback) -> dict[str, Any]:
    try:
        state = callback.state_dict()
        json.dumps(state)
    except Exception as error:
        raise JobFailed(
            f"callback {callback}: state_dict raised {type(error).__name__}: {error}; it returns a dict of numbers, "
            "texts, lists and dicts"
        ) from error
    return state


def bring_states(options: RunOptions, result: Result) -> None:
    """Give the callbacks of this process the states that they have in the run's process at its end."""
    for each, told in zip(options.callbacks, result.callbacks or (), strict=False):
        if isinstance(each, Callback) and told["state"]:
            each.load_state_dict(told["state"])
