"""Calls as text, parsed by hand: `local_sgd(period=8, route=ring)`. Nothing is evaluated.

calls   = call { "," call }
call    = name [ "(" [ argument { "," argument } ] ")" ]
argument = [ name "=" ] value          positional ones first
value   = number | string | "true" | "false" | "none" | name | name "(" ... ")"
"""

from __future__ import annotations

import re
from math import isinf
from typing import NamedTuple

MAX_CHARACTERS = 4_000
MAX_DEPTH = 16

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIGITS = r"\d+(?:_\d+)*"
_INTEGER = re.compile(rf"[+-]?{_DIGITS}", re.ASCII)
_NUMBER = re.compile(rf"[+-]?(?:(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][+-]?\d+)?|inf\b)", re.ASCII)
_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}


class Name(str):
    """A bare name among the arguments, such as the `ring` of `sync_sgd(route=ring)`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Call(NamedTuple):
    """A function's name and its arguments: numbers, strings, None, `Name`s and nested `Call`s."""

    name: str
    positional: tuple[object, ...]
    keywords: dict[str, object]

    def __repr__(self) -> str:
        keywords = [f"{key}={value!r}" for key, value in self.keywords.items()]
        return f"{self.name}({', '.join([*map(repr, self.positional), *keywords])})"


class _Parsed(NamedTuple):
    value: object
    end: int


def parse_call(text: str) -> Call:
    """The one call that `text` spells; a lone name is a call without arguments. `ValueError` shows where it is not."""
    found = _parse_all(text)
    if len(found) > 1:
        raise _error(text, text.index(",", found[0][1]), "expected one call, not a list of them")
    return found[0][0]


def split_calls(text: str) -> list[str]:
    """The calls of a list, as text: `"a, b(x=1, y=2), c"` is `["a", "b(x=1, y=2)", "c"]`."""
    ends = [end for _, end in _parse_all(text)]
    starts = [0, *(text.index(",", end) + 1 for end in ends[:-1])]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _parse_all(text: str) -> list[tuple[Call, int]]:
    """Every call of a list, and where each ends."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a call of {len(text):,} characters is too long; at most {MAX_CHARACTERS:,} are read")
    found: list[tuple[Call, int]] = []
    at = 0
    while True:
        name, end = _name(text, _skip(text, at))
        call, end = _after_name(text, name, end, depth=1)
        found.append((call, end))
        at = _skip(text, end)
        if at == len(text):
            return found
        if text[at] != ",":
            hint = "; names are written with _ instead of -" if text[at] == "-" else ""
            raise _error(text, at, f"expected a comma or the end, not {text[at]!r}{hint}")
        at += 1


def _after_name(text: str, name: str, at: int, depth: int) -> tuple[Call, int]:
    """The call of `name`, whose arguments, if any, follow at `at`."""
    opened = _skip(text, at)
    if not text.startswith("(", opened):
        return Call(name, (), {}), at
    if depth > MAX_DEPTH:
        raise _error(text, opened, f"calls are nested more than {MAX_DEPTH} deep")
    positional: list[object] = []
    keywords: dict[str, object] = {}
    at = _skip(text, opened + 1)
    if text.startswith(")", at):
        return Call(name, (), keywords), at + 1
    while True:
        at = _argument(text, _skip(text, at), depth, positional, keywords)
        at = _skip(text, at)
        if text.startswith(")", at):
            return Call(name, tuple(positional), keywords), at + 1
        if at == len(text):
            raise _error(text, opened, "this parenthesis is never closed")
        if text[at] != ",":
            raise _error(text, at, f"expected a comma or ')', not {text[at]!r}")
        at += 1


def _argument(text: str, at: int, depth: int, positional: list[object], keywords: dict[str, object]) -> int:
    """Read one argument at `at` into `positional` or `keywords`; where it ends."""
    match = _NAME.match(text, at)
    equals = _skip(text, match.end()) if match else at
    if match and text.startswith("=", equals):
        key = match.group()
        if key in keywords:
            raise _error(text, at, f"{key} is given twice")
        keywords[key], end = _value(text, _skip(text, equals + 1), depth)
        return end
    value, end = _value(text, at, depth)
    if keywords:
        raise _error(text, at, "an argument without a name must come before those with one")
    positional.append(value)
    return end


def _value(text: str, at: int, depth: int) -> _Parsed:
    if number := _NUMBER.match(text, at):
        return _Parsed(_number(text, number), number.end())
    if string := _STRING.match(text, at):
        return _Parsed(_unescaped(text, string), string.end())
    if text.startswith(("'", '"'), at):
        raise _error(text, at, "this text has no closing quote")
    name, end = _name(text, at, "a value: a number, a name, true, false, none, a call, or text in quotes")
    call, call_end = _after_name(text, name, end, depth + 1)
    if call_end > end:
        return _Parsed(call, call_end)
    return _Parsed(_CONSTANTS[name] if name in _CONSTANTS else Name(name), end)


def _number(text: str, match: re.Match[str]) -> int | float:
    written = match.group()
    if _INTEGER.fullmatch(written):
        return int(written)
    value = float(written)
    if isinf(value) and "inf" not in written:
        raise _error(text, match.start(), f"{written} is too large for a number")
    return value


def _unescaped(text: str, match: re.Match[str]) -> str:
    """The value of a quoted string, with Python's escapes undone."""
    index = match.lastindex or 1

    def character(escape: re.Match[str]) -> str:
        code = escape[1] or escape[2] or escape[3]
        if code and int(code, 16) <= 0x10FFFF:
            return chr(int(code, 16))
        if escape[4] in _ESCAPED:
            return _ESCAPED[escape[4]]
        raise _error(text, match.start(index) + escape.start(), "unknown escape; a backslash is written twice")

    return _ESCAPE.sub(character, match[index])


def _name(text: str, at: int, wanted: str = "a name") -> tuple[str, int]:
    if match := _NAME.match(text, at):
        return match.group(), match.end()
    raise _error(text, at, f"expected {wanted}, not {text[at]!r}" if at < len(text) else f"expected {wanted}")


def _skip(text: str, at: int) -> int:
    """The first position from `at` on that is not white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _error(text: str, at: int, what: str) -> ValueError:
    """`what`, and below it the text with a caret under position `at`."""
    start, stop = max(0, at - 60), at + 60
    shown = "".join(c if c.isprintable() else " " for c in text[start:stop])
    return ValueError(f"{what}\n    {shown}\n    {' ' * (at - start)}^")
