"""Resolution of a parsed call: functions and names are looked up in tables, arguments are checked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from polytempo.spec.text.call import Call, Name

Function = Callable[..., object]
_PLAIN = (bool, int, float, str)


class Factory(NamedTuple):
    """A name for the result of `make()`, which takes arguments: `lognormal`, `lognormal(sigma=1)`."""

    make: Function


def resolve(
    call: Call,
    functions: Mapping[str, Function],
    names: Mapping[str, Mapping[str, object]],
    *,
    what: str = "function",
) -> object:
    """Call the function of `functions` that `call` names; errors say `what` it is.

    A name or call given for parameter `p` is looked up in `names[p]`, where the table has `p`; other
    calls are looked up in `functions`, and other names are text. `ValueError` where a function or
    name does not exist, and where an argument is unknown, missing, surplus or of the wrong type.
    """
    if call.name not in functions:
        raise ValueError(unknown(what, call.name, functions))
    return _called(functions[call.name], call, functions, names)


def signature_of(function: Function) -> str:
    """The function's signature as a person writes it: `local_sgd(period: int = 8, route: Route = native)`."""
    hints = _hints(function)
    parameters = inspect.signature(function).parameters.values()
    return f"{_name_of(function)}({', '.join(_shown(p, hints.get(p.name)) for p in parameters)})"


def unknown(what: str, name: str, existing: Collection[str]) -> str:
    """`there is no route 'rign' (did you mean ring?); there are: native, ring, …`."""
    close = get_close_matches(name, existing, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"there is no {what} {name!r}{meant}; there are: {', '.join(sorted(existing))}"


def _called(
    function: Function, call: Call, functions: Mapping[str, Function], names: Mapping[str, Mapping[str, object]]
) -> object:
    """`function` of the call's arguments."""
    signature = inspect.signature(function)
    _check_arguments(function, signature, call)
    bound = signature.bind(*call.positional, **call.keywords)
    hints = _hints(function)

    def value(parameter: inspect.Parameter, given: object) -> object:
        if parameter.kind is parameter.VAR_POSITIONAL and isinstance(given, tuple):
            return tuple(argument(parameter.name, each) for each in given)
        if parameter.kind is parameter.VAR_KEYWORD and isinstance(given, dict):
            return {key: argument(key, each) for key, each in given.items()}
        return argument(parameter.name, given)

    def argument(name: str, given: object) -> object:
        where = f"{call.name}({name}={given!r})"
        optional = name in signature.parameters and signature.parameters[name].default is None
        hint = hints.get(name)
        if (
            name in names
            and not (given is None and optional)
            and not _is_plain(hint)
            and type(given) not in _members(hint)
        ):
            return _looked_up(where, name, given, functions, names)
        if isinstance(given, Call):
            given = resolve(given, functions, names)
        return _typed(where, hint, given)

    for name, given in bound.arguments.items():
        bound.arguments[name] = value(signature.parameters[name], given)
    try:
        return function(*bound.args, **bound.kwargs)
    except TypeError as error:  # an argument that the function refuses, such as a wire route in place of a route
        raise ValueError(str(error)) from error


def _check_arguments(function: Function, signature: inspect.Signature, call: Call) -> None:
    """Refuse arguments that the function does not take, and calls that lack one."""
    parameters = signature.parameters
    takes = f"it is written {signature_of(function)}"
    for key in call.keywords:
        if key not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            close = get_close_matches(key, parameters, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"{call.name} has no argument {key!r}{meant}; {takes}")
    try:
        signature.bind(*call.positional, **call.keywords)
    except TypeError as error:
        raise ValueError(f"{call!r}: {error}; {takes}") from None


def _looked_up(
    where: str, name: str, given: object, functions: Mapping[str, Function], names: Mapping[str, Mapping[str, object]]
) -> object:
    """The meaning of a name, or a call, for the parameter `name`."""
    table = names[name]
    wanted = given.name if isinstance(given, Call) else given
    if not isinstance(given, str | Call):
        raise ValueError(f"{where}: {name} must be one of these names: {', '.join(sorted(table))}")
    if wanted not in table:
        raise ValueError(f"{where}: {unknown(name, str(wanted), table)}")
    found = table[str(wanted)]
    if isinstance(found, Factory):
        return _called(found.make, given if isinstance(given, Call) else Call(str(given), (), {}), functions, names)
    if isinstance(given, Call):
        raise ValueError(f"{where}: {given.name} takes no arguments here; write {name}={given.name}")
    return found


def _typed(where: str, hint: Any, given: object) -> object:
    """`given`, checked against `hint`; types that are not plain are not checked. Names are text, ints are floats."""
    allowed = _members(hint)
    if not _is_plain(hint):
        if isinstance(given, Name):
            raise ValueError(f"{where}: this argument takes no such name; text is written in quotes: '{given}'")
        return given
    if isinstance(given, Name) and str in allowed:
        return str(given)
    if type(given) is int and int not in allowed and float in allowed:
        return float(given)
    if type(given) not in allowed:
        article = "an" if _type_name(hint)[0] in "aeiou" else "a"
        raise ValueError(f"{where}: expected {article} {_type_name(hint)}, not {given!r}")
    return given


def _hints(function: Function) -> dict[str, Any]:
    """The parameters' types; types that cannot be known at run time are left out."""
    try:
        return inspect.get_annotations(function, eval_str=True)
    except NameError:
        return {}


def _is_plain(hint: Any) -> bool:
    """True for numbers and text: their values are written as they are, and no table has a meaning for them."""
    return hint is not None and all(kind in _PLAIN or kind is NoneType for kind in _members(hint))


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _type_name(hint: Any) -> str:
    return " | ".join("None" if kind is NoneType else str(kind.__name__) for kind in _members(hint))


def _shown(parameter: inspect.Parameter, hint: Any) -> str:
    star = (
        "*" if parameter.kind is parameter.VAR_POSITIONAL else "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    )
    plain = all(kind in _PLAIN or kind is NoneType for kind in _members(hint))
    typed = f": {_type_name(hint)}" if plain and hint is not None else _alias(parameter.annotation)
    if parameter.default is parameter.empty:
        return f"{star}{parameter.name}{typed}"
    return f"{parameter.name}{typed} = {_spelled_value(parameter.default)}"


def _alias(annotation: object) -> str:
    """`: Route | WireRoute`: a type by the names that the source gives it, without None."""
    names = annotation.split(" | ") if isinstance(annotation, str) else []
    if not names or not all(re.fullmatch(r"[A-Za-z]\w*", name) for name in names):
        return ""
    return ": " + " | ".join(name for name in names if name != "None")


def _spelled_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return getattr(value, "__name__", None) or repr(value)


def _name_of(function: Function) -> str:
    return getattr(function, "__name__", repr(function))
