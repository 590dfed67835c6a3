"""Names of strategies and codecs: the call that makes one, which `polytempo.parse_strategy` reads again."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

from polytempo.core.codec import Codec
from polytempo.core.transform import Transform

BRIEF = ("codec", "pull_codec", "hierarchical", "outer_optimizer", "merge")
"""Arguments that most strategies' names leave out where they have their defaults."""


def call_name(
    function: Callable[..., object],
    arguments: Mapping[str, object],
    brief: Collection[str] = BRIEF,
) -> str:
    """The call of `function` with these arguments as a person writes it: `local_sgd(period=8, route=native)`.

    The function's signature says which arguments there are, so no strategy lists them again:

        def local_sgd(period: int = 8, route: Route = native) -> Strategy:
            return Strategy(call_name(local_sgd, locals()), parameters=every(period, mean(route)))

    Other entries of `arguments` do not count. An argument of `brief` is left out where it has its default value.
    """
    parameters = _parameters(function)
    given = {name: arguments[name] for name in parameters if name in arguments}
    shown = {name: value for name, value in given.items() if name not in brief or value != parameters[name].default}
    return written_call(function.__name__, shown)


def codec_name(function: Callable[..., object], codec: object, brief: Collection[str] = ()) -> str:
    """The call that makes `codec`. Its attributes have the arguments' names. A whole number has no `.0`: `clip=1`."""
    given = {name: _whole(value) for name, value in vars(codec).items()}
    return call_name(function, given, brief)


def written_call(name: str, arguments: Mapping[str, object]) -> str:
    """A call of `name`: functions among the arguments stand for themselves by name, and so do codecs."""
    return f"{name}({', '.join(f'{key}={_written(value)}' for key, value in arguments.items())})"


@lru_cache(maxsize=256)
def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _written(value: object) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    if isinstance(value, Codec):
        return value.facts.name
    if isinstance(value, Transform) and value.name:
        return value.name
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # an address differs from rank to rank
