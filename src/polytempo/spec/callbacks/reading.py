"""Callbacks from text: `early_stop(patience=3), my_module:Mine(limit=2)`; nothing is evaluated."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from polytempo.spec.callbacks.callback import Callback
from polytempo.spec.callbacks.early_stop import early_stop
from polytempo.spec.callbacks.export import Export, export
from polytempo.spec.callbacks.keep import keep
from polytempo.spec.callbacks.median_stop import median_stop
from polytempo.spec.callbacks.time_budget import time_budget
from polytempo.spec.text.call import parse_call, split
from polytempo.spec.text.resolution import resolve

MADE_BY: dict[str, Callable[..., object]] = {
    "early_stop": early_stop,
    "export": export,
    "keep": keep,
    "median_stop": median_stop,
    "time_budget": time_budget,
}
_OWN = re.compile(r"\s*([A-Za-z_][\w.]*):([A-Za-z_]\w*)\s*(\(.*\))?\s*", re.DOTALL)


class Callbacks(tuple[Callback, ...]):
    """Several callbacks, in the order of their calls."""

    __slots__ = ()

    def __str__(self) -> str:
        return ", ".join(map(str, self))


NO_CALLBACKS = Callbacks()


def callbacks_of(given: object) -> Callbacks:
    """The value of an option `callbacks`: callbacks, their texts, or one text of several. ValueError for others.

    `Incompatible` for two exports to one place.
    """
    if isinstance(given, Callback | str):
        given = [given]
    if given is None:
        return Callbacks()
    if not isinstance(given, Iterable):
        raise ValueError("must be a list of callbacks, or their text, such as early_stop(patience=3)")
    found: list[Callback] = []
    for each in given:
        if isinstance(each, str):
            found += [_made(text) for text in split(each)]
        elif isinstance(each, Callback):
            found.append(each)
        else:
            raise ValueError(
                f"{each!r} is not a callback; derive its class from pt.callbacks.Callback, and give an object of it"
            )
    places = Counter(Path(each.to) for each in found if isinstance(each, Export))
    for place, number in places.items():
        if number > 1:
            refuse: Any = import_module("polytempo.core.calls.refusals").refuse  # it loads torch
            refuse({"exports to one place"}, number=number, to=place)
    return Callbacks(found)


def callbacks_like(incomplete: str) -> list[str]:
    """The names of callbacks that begin with the text, for completion in a shell."""
    return [name for name in MADE_BY if name.startswith(incomplete)]


def unnamed(callbacks: Iterable[object]) -> list[str]:
    """The classes of callbacks that no other process can make, as they have no text."""
    return [type(each).__name__ for each in callbacks if not getattr(each, "text", "")]


def _made(text: str) -> Callback:
    own = _OWN.fullmatch(text)
    if own is None:
        made = resolve(parse_call(text), MADE_BY, {}, what="callback")
    else:
        module, name, arguments = own.groups()
        call = parse_call(name + (arguments or "()"))
        made = resolve(call, {name: _found(module, name)}, {}, what="callback")
    if not isinstance(made, Callback):
        raise ValueError(f"{text} makes a {type(made).__name__}, and not a pt.callbacks.Callback")
    made.text = made.text or text
    return made


def _found(module: str, name: str) -> Any:
    """The class or function of that name; modules of one's own are found in the current directory."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {error.name}; give a module on the path, or in {here}") from error
    except AttributeError:
        raise ValueError(f"module {module} has no {name}; name a class or a function in it") from None
