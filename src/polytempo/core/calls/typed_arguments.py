"""`typed`: a function that refuses arguments of another type than its signature says, and names them.

Checked are numbers, texts, None and classes; functions and protocols are checked where they are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which raises ValueError for an argument of a wrong type: `local_sgd(period="8")`."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*values: P.args, **more: P.kwargs) -> R:
        try:
            given = signature.bind(*values, **more).arguments
        except TypeError:  # which the call itself raises, naming the function
            return function(*values, **more)
        hints = inspect.get_annotations(function, eval_str=True)
        for key, value in given.items():
            if signature.parameters[key].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                check_type(f"{function.__name__}({key}=…)", hints[key], value)
        return function(*values, **more)

    return checked


def check_type(where: str, hint: Any, given: object) -> None:
    """ValueError, which begins with `where`, for a value of another type than `hint`. An int is a float, too."""
    kinds = [_bare(kind) for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
    if all(_is_checked(kind) for kind in kinds) and not any(_is(kind, given) for kind in kinds):
        wanted = [kind for kind in kinds if kind is not NoneType] or kinds
        raise ValueError(f"{where}: expected {' or '.join(map(_written, wanted))}, not {given!r}")


def _bare(kind: Any) -> Any:
    """`Mapping[int, float]` as Mapping: its items are not checked."""
    return get_origin(kind) if get_origin(kind) in (Mapping, Sequence) else kind


def _is_checked(kind: Any) -> bool:
    return get_origin(kind) is Literal or (isinstance(kind, type) and not getattr(kind, "_is_protocol", False))


def _is(kind: Any, given: object) -> bool:
    if get_origin(kind) is Literal:
        return given in get_args(kind)
    if isinstance(given, bool):
        return kind is bool
    return isinstance(given, {int: Integral, float: Real}.get(kind, kind))


def _written(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    known = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}
    return known.get(kind, f"a {kind.__name__}")


def check_whole(**given: object) -> None:
    """Raise ValueError that names a value other than a whole number: not 2.0, because counts are exact, nor True."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number, got {value!r}")


def check_real(**given: object) -> None:
    """Raise ValueError that names a value other than a number."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name} must be a number, got {value!r}")
