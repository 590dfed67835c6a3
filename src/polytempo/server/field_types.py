"""Which fields of a structure can hold values of some types, by what its annotations say."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args, get_type_hints


@cache
def fields_of(kind: Any, types: tuple[type, ...]) -> tuple[str, ...]:
    """The fields of the `msgspec.Struct` `kind` that can hold one of the `types`, or tuples of them."""
    hints = get_type_hints(kind)
    return tuple(name for name in kind.__struct_fields__ if _holds(hints[name], types))


def _holds(hint: Any, types: tuple[type, ...]) -> bool:
    alone = isinstance(hint, type) and issubclass(hint, types)
    return alone or any(_holds(part, types) for part in get_args(hint))  # a Literal's are names
