"""`polytempo strategies`."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from polytempo.cli.catalogue import STRATEGIES
from polytempo.cli.resolve import Function, signature_of
from polytempo.cli.show import show_json, show_table


class Entry(NamedTuple):
    """A strategy as the list shows it."""

    name: str
    signature: str
    summary: str
    source: str


def strategies(*, as_json: bool) -> None:
    """Print every strategy: its signature, what it does, and its paper."""
    entries = [described(name, function) for name, function in STRATEGIES.items()]
    if as_json:
        show_json([entry._asdict() for entry in entries])
    else:
        rows = [(entry.signature, entry.summary, entry.source) for entry in entries]
        show_table(("strategy", "what it does", "source"), rows)


def described(name: str, function: Function) -> Entry:
    """The docstring's first line, and its paragraph that begins with `Source:` (or that of its module)."""
    own = inspect.getdoc(function) or ""
    module = inspect.getmodule(function)
    return Entry(
        name,
        signature_of(function),
        own.partition("\n")[0],
        source_in(own) or source_in((module and inspect.getdoc(module)) or ""),
    )


def source_in(docstring: str) -> str:
    """What follows `Source:` up to the end of its paragraph, on one line; empty where there is none."""
    _, found, after = f"\n{docstring}".partition("\nSource:")
    return " ".join(after.partition("\n\n")[0].split()) if found else ""
