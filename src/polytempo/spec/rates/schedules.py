"""Learning-rate schedules by name: torch's, `plateau`, or `module:function`, with arguments as text or a table.

    schedule="CosineAnnealingLR(T_max='10 epochs')"        an option, or `Job(schedule=…)`
    schedule = { call = "plateau", patience = 3 }          in a job file

A number of epochs in quotes becomes steps. Nothing is evaluated.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from polytempo.spec.text.call import Call, parse_call

_EPOCHS = re.compile(r"\s*([0-9.]+)\s*epochs?\s*")
_OWN = re.compile(r"\s*([A-Za-z_][\w.]*):([A-Za-z_]\w*\s*(?:\(.*\))?)\s*", re.DOTALL)
_TORCH = "torch.optim.lr_scheduler"
_LIKELY = ("plateau", "CosineAnnealingLR", "LinearLR", "OneCycleLR", "StepLR", "ExponentialLR", "PolynomialLR")


def __getattr__(name: str) -> Any:
    """`plateau`, and torch's schedules."""
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(import_module("polytempo.spec.rates.plateau" if name == "plateau" else _TORCH), name)


def __dir__() -> list[str]:
    return ["plateau", *import_module(_TORCH).__all__]


class NamedSchedule:
    """A schedule as text, called as a job's `schedule` is; torch is loaded then."""

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
        return scheduled(make, kept, optimizer, steps_per_epoch, f"schedule {self.text}")

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedSchedule) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


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
    make: Callable[..., Any], arguments: Mapping[str, Any], optimizer: Any, steps_per_epoch: int, who: str
) -> Any:
    """`make(optimizer, …)`, where "3 epochs" becomes steps; a function's second argument is the steps of an epoch."""
    kept = {name: _in_steps(value, steps_per_epoch) for name, value in arguments.items()}
    given = (optimizer, steps_per_epoch) if _takes_steps(make) else (optimizer,)
    try:
        inspect.signature(make).bind(*given, **kept)
    except TypeError as error:
        raise ValueError(f"{who}: {error}; it takes {inspect.signature(make)}") from None
    return make(*given, **kept)


def _takes_steps(make: Callable[..., Any]) -> bool:
    second = list(inspect.signature(make).parameters.values())[1:2]
    needed = [each for each in second if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return bool(needed) and not isinstance(make, type)


def _value(text: str, given: object) -> object:
    if isinstance(given, Call):
        raise ValueError(f"schedule {text}: {given!r} among the arguments is not called; write a function of your own")
    return str(given) if isinstance(given, str) else given


def _in_steps(value: object, steps_per_epoch: int) -> object:
    if isinstance(value, list):
        return [_in_steps(each, steps_per_epoch) for each in value]
    found = _EPOCHS.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else max(1, round(float(found[1]) * steps_per_epoch))
