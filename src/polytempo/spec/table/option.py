"""`Option`: an entry in the table of options, and the check of a value by its entry. Torch is not loaded.

RunOptions, CommandOptions     the table: one annotated field an option; other commands have tables of their own
  │
  ├─▶ keywords of pt.run, …    `RunOptions.__post_init__` checks them
  ├─▶ the command line         `cli.options.command_line` declares and reads them
  ├─▶ files of options         `cli.options.command_options` reads them
  └─▶ the documentation        `docs/extensions/options_page.py` lists them
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from numbers import Number
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

EVERYWHERE = ("train", "compare", "simulate")
PROCESSES = ("train", "compare")
ONE_STRATEGY = ("train", "simulate")
TRAIN = ("train",)

Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
NumThreads = Annotated[int, Meta(ge=1, le=4096)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]

_WORDS = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
_WORDS |= {"object": "a table", "array": "a list"}


class Option(NamedTuple):
    """The notes of an option in the table, beside its name, type and default."""

    section: str
    """The heading in `--help` and in the documentation."""
    value: str = ""
    """A word for its value there, such as `SECONDS`; "" for a flag."""
    programs: tuple[str, ...] = EVERYWHERE
    """The commands that have it; files may name it for all."""
    read: Callable[[Any], object] | None = None
    """Makes the value from text or another form. Raises ValueError with the remedy."""
    flag: str = ""
    """How it is written on the command line; "": by its name."""
    complete: Callable[[str], list[str]] | None = None
    """Completes a value in a shell."""


class OptionRow(NamedTuple):
    """A row of the table."""

    name: str
    kind: Any
    """The type, with bounds."""
    option: Option
    default: object
    """`MISSING` for an argument that must be given."""
    help: str
    """The first paragraph of its docstring."""
    more: str
    """The others."""

    @property
    def plain_kind(self) -> type:
        """The type without None and bounds; `str` where it is read from text, a list for several."""
        found = next(each for each in map(_bare, _members(self.kind)) if each is not NoneType)
        if get_origin(found) is Sequence or (get_origin(found) is tuple and not self.option.section):
            return list[str]
        return found if found is Path or (self.option.read is None and found in (bool, int, float)) else str

    def checked(self, value: object) -> object:
        """The value in its final form. ValueError with the remedy where the option cannot have it."""
        if self.option.read is not None:
            return self.option.read(value)
        given = value.item() if isinstance(value, Number) and hasattr(value, "item") else value  # NumPy's
        if isinstance(given, str) and not given.strip():
            raise ValueError("the value is empty; write a name, or leave the option out")
        if get_origin(self.kind) is Literal and given not in get_args(self.kind):
            raise ValueError(f"must be one of {', '.join(map(repr, get_args(self.kind)))}")
        found = converted(given, self.kind)
        return found if isinstance(found, dict) else value


def entries(table: type) -> dict[str, OptionRow]:
    """The rows of a table: a dataclass with an `Option` in the annotation of each field, and docstrings.

    A row of another table in place of the `Option` says the docstring and the bounds, too.
    """
    return _entries(table)


@cache
def _entries(table: type) -> dict[str, OptionRow]:
    found = {}
    hints, documented = get_type_hints(table, include_extras=True), _docstrings(table)
    for each in fields(table):
        if not each.init:
            continue
        kind, *noted = get_args(hints[each.name])
        option = next(note for note in noted if isinstance(note, Option | OptionRow))
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if isinstance(option, OptionRow):
            found[each.name] = option._replace(name=each.name, default=default)
            continue
        bounds = tuple(note for note in noted if note is not option)
        about, _, more = " ".join(documented[each.name].splitlines()).partition("  ")
        found[each.name] = OptionRow(
            each.name, Annotated[(kind, *bounds)] if bounds else kind, option, default, about, more
        )
    return found


def _docstrings(table: type) -> dict[str, str]:
    """The texts behind the fields of a class, from its source."""
    [body] = (
        node.body
        for node in ast.parse(Path(inspect.getfile(table)).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == table.__name__
    )
    return {
        ast.unparse(field.target): inspect.cleandoc(ast.literal_eval(text.value))
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def unknown_option(name: str, known: Iterable[str]) -> str:
    """`there is no option 'epohcs' (did you mean epochs?); there are: epochs, …`."""
    known = list(known)
    close = get_close_matches(name, known, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"there is no option {name!r}{meant}; there are: {', '.join(known)}"


def converted(value: object, kind: Any) -> Any:
    """`value` as `kind`, a type with bounds; keys may be text, as in files. ValueError names the type."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        said = str(error).replace("Expected", "must be", 1).replace(" | null", "")
        said = said.replace(f"`float` <= {sys.float_info.max!r}", "a finite number")
        said = said.replace(" - at `key` in `$`", " as a key").replace(" - at `$[...]`", " as a value")
        raise ValueError(re.sub(r"`(\w+)`", lambda kind: _WORDS.get(kind[1], kind[0]), said)) from None


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind
