"""Resolving a call to an object: names, nested calls, and the checks of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from polytempo.spec.text.call import parse_call
from polytempo.spec.text.resolution import Factory, resolve, signature_of


def ring() -> str:
    return "the ring"


def stretched(factor: float = 2.0) -> str:
    return f"stretched by {factor!r}"


def plain(
    period: int = 8, rate: float = 0.5, hard: bool = False, mode: str = "sum", limit: int | None = None
) -> object:
    return (period, rate, hard, mode, limit)


def routed(route: Callable[[], str], between: Callable[[], str] | None = None) -> object:
    return (route, between)


def nested(inner: object, outer: object = 1) -> object:
    return (inner, outer)


def several(*parts: object) -> object:
    return parts


FUNCTIONS = {function.__name__: function for function in (plain, routed, nested, several)}
ROUTES = {"ring": ring, "stretched": Factory(stretched)}
NAMES = {"route": ROUTES, "between": ROUTES}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", (8, 0.5, False, "sum", None)),
        ("plain(3, mode=mean)", (3, 0.5, False, "mean", None)),
        ("plain(mode='a b', limit=4, hard=true)", (8, 0.5, True, "a b", 4)),
        ("plain(limit=none)", (8, 0.5, False, "sum", None)),
        ("routed(ring)", (ring, None)),
        ("routed(route='ring')", (ring, None)),
        ("routed(route=ring, between=none)", (ring, None)),
        ("routed(stretched, between=stretched(3))", ("stretched by 2.0", "stretched by 3.0")),
        ("nested(plain(1))", ((1, 0.5, False, "sum", None), 1)),
        ("several(plain(1), 2)", ((1, 0.5, False, "sum", None), 2)),
    ],
)
def test_a_call_is_resolved(text: str, value: object) -> None:
    """Functions are called; names stand for entries of their parameter's table."""
    assert resolve(parse_call(text), FUNCTIONS, NAMES) == value


def test_an_int_for_a_float_becomes_one() -> None:
    """So that `rate=1` and `rate=1.0` are the same strategy."""
    assert repr(resolve(parse_call("plain(rate=1)"), FUNCTIONS, NAMES)) == "(8, 1.0, False, 'sum', None)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plian", "no function 'plian' (did you mean plain?); there are: nested, plain, routed, several"),
        ("zzz", "no function 'zzz'; there are: nested, plain, routed, several"),
        ("nested(zzz())", "no function 'zzz'"),
        (
            "plain(perod=3)",
            "plain has no argument 'perod' (did you mean period?); it is written plain(period: int = 8, "
            "rate: float = 0.5, hard: bool = false, mode: str = 'sum', limit: int | None = none)",
        ),
        ("routed", "routed(): missing a required argument: 'route'; it is written routed(route, between = none)"),
        ("routed(ring, ring, ring)", "too many positional arguments; it is written routed("),
        ("plain(1, period=2)", "multiple values for argument 'period'"),
        ("plain(period=2.5)", "plain(period=2.5): expected an int, not 2.5"),
        ("plain(period=true)", "plain(period=True): expected an int, not True"),
        ("plain(period=none)", "expected an int, not None"),
        ("plain(period=ring)", "expected an int, not ring"),
        ("plain(rate='1')", "expected a float, not '1'"),
        ("plain(hard=1)", "expected a bool, not 1"),
        ("plain(mode=1)", "expected a str, not 1"),
        ("plain(limit=1.0)", "expected an int | None, not 1.0"),
        (
            "routed(rign)",
            "routed(route=rign): there is no route 'rign' (did you mean ring?); there are: ring, stretched",
        ),
        ("routed(3)", "route must be one of these names: ring, stretched"),
        ("routed(none)", "route must be one of these names: ring, stretched"),
        ("routed(ring(1))", "ring takes no arguments here; write route=ring"),
        ("routed(stretched(2, 3))", "too many positional arguments; it is written stretched(factor: float = 2.0)"),
        (
            "nested(ring)",
            "nested(inner=ring): this argument takes no such name; text is written in quotes: 'ring'",
        ),
    ],
)
def test_a_wrong_call_is_told_what_is_right(text: str, message: str) -> None:
    """The error names the argument, and a remedy."""
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(parse_call(text), FUNCTIONS, NAMES)


def test_signatures() -> None:
    """Types where they are plain; functions by their name."""

    def strategy(period: int, route: Callable[[], str] = ring, *parts: int, **rest: float) -> None: ...

    assert signature_of(strategy) == "strategy(period: int, route = ring, *parts: int, **rest: float)"
