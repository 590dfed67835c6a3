"""Calls as text: `local_sgd(period=8, route=ring)`. Python parses them, a few kinds of node pass, nothing is evaluated.

calls    = call { "," call }
call     = name [ "(" [ argument { "," argument } ] ")" ]
argument = [ name "=" ] value          positional ones first
value    = number | string | "true" | "false" | "none" | "inf" | name | name "(" ... ")"
"""

from __future__ import annotations

import ast
import warnings
from math import inf, isinf
from typing import NamedTuple

MAX_CHARACTERS = 4_000
MAX_DEPTH = 16

_CONSTANTS = {"true": True, "false": False, "none": None, "inf": inf}
_VALUE = "a value: a number, a name, true, false, none, a call, or text in quotes"

_SAID = {
    "closing parenthesis ']' does not match opening parenthesis '('": "a parenthesis is never closed",
    "closing parenthesis ')' does not match opening parenthesis '['": "this parenthesis was never opened",
    "'[' was never closed": "there is no place for a comment",
}
"""Python's words about the brackets that `_nodes` puts around the text, and ours."""


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


def parse_call(text: str) -> Call:
    """The call that `text` spells; a lone name has no arguments. `ValueError` shows the place of a mistake."""
    nodes = _nodes(text)
    if len(nodes) > 1:
        raise _error(text, nodes[1], "expected one call, not a list of them")
    return _call(text, nodes[0], 1)


def split_calls(text: str) -> list[str]:
    """The calls of a list, as text: `"a, b(x=1, y=2), c"` is `["a", "b(x=1, y=2)", "c"]`."""
    nodes = _nodes(text)
    for node in nodes:
        _call(text, node, 1)
    return [str(ast.get_source_segment(f"[{text}]", node)) for node in nodes]


def split(text: str, between: str = ",", opening: str = "(", closing: str = ")") -> list[str]:
    """The parts between characters of `between` that are in no brackets and no quotes, unparsed."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in opening) - (character in closing)
            if character in between and depth == 0:
                parts.append("")
                continue
        parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _nodes(text: str) -> list[ast.expr]:
    """The elements of the list `[text]`."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a call of {len(text):,} characters is too long; at most {MAX_CHARACTERS:,} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as an unknown escape in a string
            parsed = ast.parse(f"[{text}]", mode="eval").body
    except SyntaxError as error:
        place = _place(text, error.lineno or 1, (error.offset or 1) - 1)
        raise _shown(text, place, f"this is not a call: {_SAID.get(error.msg, error.msg)}") from None
    except (ValueError, RecursionError, MemoryError):
        raise ValueError("this is not a call: it is nested too deeply, or has an invalid character") from None
    if not isinstance(parsed, ast.List) or not parsed.elts:
        raise _error(text, parsed, "expected a name")
    return parsed.elts


def _call(text: str, node: ast.expr, depth: int) -> Call:
    if isinstance(node, ast.Name):
        return Call(node.id, (), {})
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        hint = "; names are written with _ instead of -" if isinstance(node, ast.BinOp) else ""
        raise _error(text, node, f"expected a name, or a name and its arguments{hint}")
    if depth > MAX_DEPTH:
        raise _error(text, node, f"calls are nested more than {MAX_DEPTH} deep")
    keywords: dict[str, object] = {}
    for each in node.keywords:
        if each.arg is None or each.arg in keywords:
            raise _error(text, each, f"expected {_VALUE}" if each.arg is None else f"{each.arg} is given twice")
        keywords[each.arg] = _value(text, each.value, depth)
    return Call(node.func.id, tuple(_value(text, each, depth) for each in node.args), keywords)


def _value(text: str, node: ast.expr, depth: int) -> object:
    if isinstance(node, ast.Name):
        return _CONSTANTS[node.id] if node.id in _CONSTANTS else Name(node.id)
    if isinstance(node, ast.Call):
        return _call(text, node, depth + 1)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
        if isinstance(node.value, float) and isinf(node.value):
            raise _error(text, node, f"{ast.get_source_segment(f'[{text}]', node)} is too large for a number")
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(text, node.operand, depth)
        if type(number) in (int, float):
            return -number if isinstance(node.op, ast.USub) else number  # type: ignore[operator]  # a number
    raise _error(text, node, f"expected {_VALUE}")


def _error(text: str, node: ast.expr | ast.keyword, what: str) -> ValueError:
    """`what`, and the text with a caret under the node."""
    line = f"[{text}]".splitlines()[node.lineno - 1]
    return _shown(text, _place(text, node.lineno, len(line.encode()[: node.col_offset].decode())), what)


def _place(text: str, line: int, column: int) -> int:
    """The place in `text` of a column, from 0, in a line, from 1, of `[text]`."""
    before = sum(map(len, f"[{text}]".splitlines(keepends=True)[: line - 1]))
    return min(max(0, before + column - 1), len(text))


def _shown(text: str, at: int, what: str) -> ValueError:
    """`what`, and below it the text with a caret under position `at`."""
    start, stop = max(0, at - 60), at + 60
    shown = "".join(c if c.isprintable() else " " for c in text[start:stop])
    return ValueError(f"{what}\n    {shown}\n    {' ' * (at - start)}^")
