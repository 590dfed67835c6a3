"""Learning-rate schedules by name: torch's, `plateau`, or `module:function`, with arguments as text or a table.

    schedule="CosineAnnealingLR(T_max=run)"                an option, or `Job(schedule=…)`
    schedule = { call = "plateau", patience = 3 }          in a job file
    schedule = { call = "SequentialLR", schedulers = [{ call = "LinearLR", … }, …], milestones = ["0.1 run"] }

"run", "0.1 run" and "10 epochs" become steps. Nothing is evaluated.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from math import ceil
from typing import Any, NamedTuple

from polytempo.spec.text.call import Call, parse_call

_EPOCHS = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*epochs?\s*")
_RUNS = re.compile(r"\s*(\d+\.?\d*|\.\d+)?\s*run\s*")
_LIKE_LENGTHS = re.compile(r"\b(runs?|epochs?)\s*$")
_LENGTHS = ("T_max", "total_steps")
"""Arguments that are the run's length where they are left out and needed."""
_FUNCTIONS = ("lr_lambda", "scale_fn")
"""Arguments that are functions, which no text is."""
_OWN = re.compile(r"\s*([A-Za-z_][\w.]*):([A-Za-z_]\w*\s*(?:\(.*\))?)\s*", re.DOTALL)
_TORCH = "torch.optim.lr_scheduler"
_LIKELY = ("plateau", "CosineAnnealingLR", "LinearLR", "OneCycleLR", "StepLR", "ExponentialLR", "PolynomialLR")


def __getattr__(name: str) -> Any:
    """`plateau`, and torch's schedules."""
    if name.startswith("_") or name not in __dir__():
        raise AttributeError(name)
    return getattr(import_module("polytempo.spec.rates.plateau" if name == "plateau" else _TORCH), name)


def __dir__() -> list[str]:
    return ["plateau", *(name for name in import_module(_TORCH).__all__ if name != "LRScheduler")]


class RunLength(NamedTuple):
    """The length of a run, in epochs, in steps, or by the earlier of both."""

    epochs: float | None
    steps: int | None

    def in_steps(self, steps_per_epoch: int) -> int | None:
        """The number of its steps; None where it is unknown."""
        by_epochs = None if self.epochs is None else max(1, ceil(self.epochs * steps_per_epoch - 1e-9))
        return min((each for each in (by_epochs, self.steps) if each is not None), default=None)


class NamedSchedule:
    """A schedule as text, called as a job's `schedule` is; torch is loaded then."""

    run: RunLength | None = None
    """The run that it is made for."""

    def __init__(self, text: str) -> None:
        own = _OWN.fullmatch(text)
        self._module, called = own.groups() if own else (__name__, text)
        self.text, self._call = text, parse_call(called)
        if self._call.positional:
            raise ValueError(f"{text}: name each argument, as in {_LIKELY[0]}(patience=3)")

    def __call__(self, optimizer: Any, steps_per_epoch: int) -> Any:
        """The schedule of `optimizer`. ValueError for a name or an argument that is not there."""
        try:
            make = getattr(import_module(self._module), self._call.name)
        except ModuleNotFoundError as error:
            raise ValueError(f"schedule {self.text}: there is no module {error.name}") from None
        except AttributeError:
            near = get_close_matches(self._call.name, dir(import_module(self._module)), 3) or _LIKELY
            raise ValueError(f"schedule {self.text}: there is no {self._call.name}; try {', '.join(near)}") from None
        kept = {name: _value(self.text, value) for name, value in self._call.keywords.items()}
        return scheduled(make, kept, optimizer, steps_per_epoch, self.run, f"schedule {self.text}")

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedSchedule) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


@dataclass(frozen=True)
class FileSchedule:
    """A schedule of a job file, called as a job's `schedule` is."""

    make: Callable[..., Any]
    arguments: Callable[[], Mapping[str, Any]]
    who: str
    run: RunLength | None = None

    def __call__(self, optimizer: Any, steps_per_epoch: int) -> Any:
        """The schedule of `optimizer`. ValueError for an argument that is not there."""
        return scheduled(self.make, self.arguments(), optimizer, steps_per_epoch, self.run, self.who)


def for_run(schedule: Any, run: RunLength | None) -> Any:
    """A job's schedule, made for a run of that length; a function of one's own as it is."""
    if isinstance(schedule, FileSchedule):
        return replace(schedule, run=run)
    if isinstance(schedule, NamedSchedule):
        schedule = copy(schedule)
        schedule.run = run
    return schedule


def schedule_of_text(given: object) -> NamedSchedule | None:
    """The value of an option `schedule`. ValueError for a text that is not a call."""
    if given is None or isinstance(given, NamedSchedule):
        return given
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"must be a text such as 'plateau(patience=3)', or one of {', '.join(_LIKELY[1:])}")
    return NamedSchedule(given)


def schedules_like(incomplete: str) -> list[str]:
    """The names of schedules that begin with the text, for completion in a shell."""
    return [name for name in _LIKELY if name.startswith(incomplete)]


def scheduled(
    make: Callable[..., Any],
    arguments: Mapping[str, Any],
    optimizer: Any,
    steps_per_epoch: int,
    run: RunLength | None,
    who: str,
) -> Any:
    """`make(optimizer, …)`, where "3 epochs" and "0.1 run" become steps.

    A function's second argument is the steps of an epoch. `T_max` and `total_steps` are the run's length by default.
    The schedule has three facts, which are saved with it: `run_steps`, the run's length, where it knows it: it ends
    there; `in_epochs`, the steps of an epoch, where it counts some; `recipe`, its call, to tell it from another one.
    """
    total = None if run is None else run.in_steps(steps_per_epoch)
    asked = {name: "run" for name in _LENGTHS if _lacks(make, name, arguments)} | dict(arguments)
    kept = {name: _in_steps(value, steps_per_epoch, total, f"{who}: {name}") for name, value in asked.items()}
    given: tuple[Any, ...] = (optimizer, steps_per_epoch) if _takes_steps(make) else (optimizer,)
    if "optimizer" in list(inspect.signature(make).parameters)[1:]:  # of ChainedScheduler
        given, kept = (), {"optimizer": optimizer} | kept
    _check_arguments(make, given, kept, who)
    parts = {name: value for name, value in kept.items() if isinstance(value, list) and value and _are_parts(value)}
    kept |= {name: [for_run(each, run)(optimizer, steps_per_epoch) for each in value] for name, value in parts.items()}
    made = make(*given, **kept)
    if hasattr(made, "optimizer"):
        made.recipe = _recipe(make, asked)
        made.run_steps = total if any(_has(_RUNS, value) for value in asked.values()) else None
        made.in_epochs = steps_per_epoch if any(_has(_EPOCHS, value) for value in asked.values()) else None
    return made


def _check_arguments(make: Callable[..., Any], given: tuple[Any, ...], kept: Mapping[str, Any], who: str) -> None:
    for name in (name for name in _FUNCTIONS if isinstance(kept.get(name), str | int | float)):
        own = 'schedule="module:function" names a function (optimizer, steps_per_epoch) of schedules'
        raise ValueError(f"{who}: {name} is {kept[name]!r}, and it takes a function; write one of your own: {own}")
    signature = inspect.signature(make)
    try:
        signature.bind(*given, **kept)
    except TypeError as error:
        tables = '; in a job file `schedulers` is a list of tables, as { call = "LinearLR" }'
        parted = tables if "schedulers" in signature.parameters else ""
        raise ValueError(f"{who}: {error}; it takes {signature}{parted}") from None


def _are_parts(value: list[object]) -> bool:
    return all(isinstance(each, FileSchedule) for each in value)


def _recipe(make: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    def shown(value: object) -> object:
        if isinstance(value, FileSchedule):
            return _recipe(value.make, value.arguments())
        return type(value).__name__

    name = f"{make.__module__}:{getattr(make, '__qualname__', type(make).__name__)}"
    return f"{name} {json.dumps(dict(arguments), sort_keys=True, default=shown)}"


def has_ended(schedule: Any) -> bool:
    """True for a schedule of the run's length at the rates of the run's last step, which stay."""
    total = getattr(schedule, "run_steps", None)
    return total is not None and bool(schedule.last_epoch >= total - 1)


def _lacks(make: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> bool:
    """True if `make` needs the length `name` and has been given none; OneCycleLR may have epochs in its place."""
    there = inspect.signature(make).parameters.get(name)
    is_torchs = getattr(make, "__module__", None) == _TORCH and there is not None and there.default is None
    needed = there is not None and (there.default is there.empty or is_torchs)
    return needed and not arguments.keys() & {name, "epochs"}


def _takes_steps(make: Callable[..., Any]) -> bool:
    second = list(inspect.signature(make).parameters.values())[1:2]
    needed = [each for each in second if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return bool(needed) and needed[0].name not in _LENGTHS and not isinstance(make, type)


def _value(text: str, given: object) -> object:
    if isinstance(given, Call):
        raise ValueError(f"schedule {text}: {given!r} among the arguments is not called; write a function of your own")
    return str(given) if isinstance(given, str) else given


def _in_steps(value: object, steps_per_epoch: int, total: int | None, who: str) -> object:
    if isinstance(value, list):
        return [_in_steps(each, steps_per_epoch, total, who) for each in value]
    if not isinstance(value, str):
        return value
    if (found := _EPOCHS.fullmatch(value)) is not None:
        return max(1, round(float(found[1]) * steps_per_epoch))
    if (found := _RUNS.fullmatch(value)) is None:
        if _LIKE_LENGTHS.search(value):
            raise ValueError(f"{who}={value!r}: write run, '0.1 run', '10 epochs' or a number of steps")
        return value
    if total is None:
        raise ValueError(
            f"{who} is the run's length, and its number of steps is unknown here; give the run steps= (with "
            f"batch_growth epochs= alone), or {who.rpartition(' ')[2]} a number"
        )
    return max(1, round(float(found[1] or 1) * total))


def _has(pattern: re.Pattern[str], value: object) -> bool:
    if isinstance(value, list):
        return any(_has(pattern, each) for each in value)
    if isinstance(value, FileSchedule):
        return any(_has(pattern, each) for each in value.arguments().values())
    return isinstance(value, str) and pattern.fullmatch(value) is not None
