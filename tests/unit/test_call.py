"""Calls as text: their parses, and the errors of mistakes."""

from __future__ import annotations

import re
from contextlib import suppress
from keyword import iskeyword

import pytest
from hypothesis import given
from hypothesis import strategies as some

from polytempo.core.calls.call_name import written_call
from polytempo.spec.text.call import MAX_CHARACTERS, MAX_DEPTH, Call, Name, parse_call, split_calls

ARGUMENTS = [
    ("1", 1),
    ("-1", -1),
    ("+7", 7),
    ("1_000", 1000),
    ("0.5", 0.5),
    (".5", 0.5),
    ("2.", 2.0),
    ("1e-3", 0.001),
    ("1E3", 1000.0),
    ("-inf", float("-inf")),
    ("true", True),
    ("True", True),
    ("false", False),
    ("False", False),
    ("none", None),
    ("None", None),
    ("'a'", "a"),
    ('"a"', "a"),
    ("'a, b)'", "a, b)"),
    (r"'it\'s\n\x41\u00e9'", "it's\nAé"),
    ("ring", Name("ring")),
    ("info", Name("info")),
    ("truely", Name("truely")),
    ("other()", Call("other", (), {})),
    ("other(period=2)", Call("other", (), {"period": 2})),
]


@pytest.mark.parametrize(("text", "value"), ARGUMENTS)
def test_an_argument_means(text: str, value: object) -> None:
    """Each kind of value, by position and by name, with and without spaces; the type counts."""
    for call in (f"f({text})", f"f( {text} )"):
        (found,) = parse_call(call).positional
        assert found == value
        assert type(found) is type(value)
    assert parse_call(f"f(x={text})").keywords == parse_call(f" f ( x = {text} ) ").keywords == {"x": value}


def test_calls() -> None:
    """A lone name is a call; everything else nests."""
    assert parse_call("name") == parse_call(" name() ") == Call("name", (), {})
    text = "name(1, x=0.5, route=ring, flag=true, text='a', nested=other(period=2))"
    assert parse_call(text) == Call(
        "name",
        (1,),
        {
            "x": 0.5,
            "route": Name("ring"),
            "flag": True,
            "text": "a",
            "nested": Call("other", (), {"period": 2}),
        },
    )


NO_VALUES = (
    *("b[0]", "lambda: 1", "1+1", "*b", "**b", "not b", "b.c", "x:=1"),
    *("b'c'", "f'{b}'", "1j", "...", "-b", "{1}", "b().c()"),
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a name\n    \n    ^"),
        ("8", "expected a name, or a name and its arguments\n    8\n    ^"),
        ("a(", "a parenthesis is never closed\n    a(\n      ^"),
        ("a(1", "a parenthesis is never closed\n    a(1\n       ^"),
        ("a(,1)", "invalid syntax\n    a(,1)\n      ^"),
        ("a(x=)", "invalid syntax\n    a(x=)\n"),
        ("a(x=1, x=2)", "x is given twice\n    a(x=1, x=2)\n           ^"),
        ("a(x=1, 2)", "positional argument follows keyword argument\n    a(x=1, 2)\n"),
        ("a b", "\n    a b\n    ^"),
        ("a(1))", "never opened\n    a(1))\n        ^"),
        ("local-sgd", "names are written with _ instead of -\n    local-sgd\n    ^"),
        ("a(10x)", "invalid decimal literal\n    a(10x)\n       ^"),
        ("a('b)", "unterminated string literal"),
        (r"a('\q')", "escape"),
        (r"a('\U00ffffff')", "unicode"),
        ("a(1e999)", "1e999 is too large for a number\n    a(1e999)\n      ^"),
        ("a, b", "expected one call, not a list of them\n    a, b\n       ^"),
        ("a # b", "there is no place for a comment"),
        ("a][b", "expected a name"),
        ("a.b()", "expected a name, or a name and its arguments\n    a.b()\n    ^"),
        ("a(\0)", "this is not a call"),
        ("-" * 3000 + "1", "nested too deeply"),
        *((f"a({value})", "expected a ") for value in NO_VALUES),
    ],
)
def test_a_mistake_is_shown_where_it_is(text: str, message: str) -> None:
    """The message, the text, and a caret under the place."""
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_call(text)


def test_length_and_depth_are_bounded() -> None:
    """Oversized texts are refused before they cost anything."""
    deep = "f(" * MAX_DEPTH + ")" * MAX_DEPTH
    assert parse_call(deep).name == "f"
    with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} deep"):
        parse_call(f"f({deep})")
    with pytest.raises(ValueError, match="too long"):
        parse_call("f" * (MAX_CHARACTERS + 1))


def test_a_mistake_in_a_long_text_shows_its_surroundings_only() -> None:
    """The caret stays under its character where the text is cut."""
    with pytest.raises(ValueError, match="invalid syntax") as raised:
        parse_call(f"f({'1, ' * 200}?, {'1, ' * 200})")
    _, text, caret = str(raised.value).split("\n")
    assert len(text) < 130
    assert text[caret.index("^")] == "?"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("a, b(x=1, y=2), c", ["a", "b(x=1, y=2)", "c"]),
        (" a ( 1 ) , b ", ["a ( 1 )", "b"]),
        ("a(x=','), b(y=g(1, 2))", ["a(x=',')", "b(y=g(1, 2))"]),
    ],
)
def test_lists(text: str, calls: list[str]) -> None:
    """Only the commas outside separate."""
    assert split_calls(text) == calls


@pytest.mark.parametrize("text", ["", ",a", "a,,b", "a b", "a(1, b"])
def test_lists_with_mistakes(text: str) -> None:
    """A list has no holes."""
    with pytest.raises(ValueError, match=r"expected|closed|this is not a call"):
        split_calls(text)


names = some.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not iskeyword(name))
values = some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(max_size=20)


@given(names, some.dictionaries(names, values, max_size=4))
def test_what_a_strategy_calls_itself_parses_back(name: str, arguments: dict[str, object]) -> None:
    """`written_call` and `parse_call` are inverse for every value that they share."""
    call = parse_call(written_call(name, arguments))
    assert call == Call(name, (), arguments)
    assert [type(value) for value in call.keywords.values()] == [type(value) for value in arguments.values()]


arguments = some.recursive(
    values | names.map(Name).filter(lambda name: name.lower() not in ("true", "false", "none", "inf")),
    lambda inner: some.builds(
        Call, names, some.lists(inner, max_size=3).map(tuple), some.dictionaries(names, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(names, arguments)
def test_a_call_as_it_shows_itself_parses_back(name: str, argument: object) -> None:
    """The representation of a call is the call."""
    call = Call(name, (argument,), {"x": argument})
    assert parse_call(repr(call)) == call


@given(some.text(alphabet="fx(),='\"\\1.e_- \n", max_size=30))
def test_any_text_is_a_call_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert isinstance(parse_call(text), Call)
